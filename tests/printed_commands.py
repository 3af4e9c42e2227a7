"""The commands of a message, as an operator copies them.

Runs in: tests. Deliberately absent: running them, which needs the test's brokers and tables.
"""

import re

PROGRAMS = ("spark-group", "kafka-configs.sh", "pip", "keytool", "openssl")
_LINE = re.compile(r"^ {4}(\S.*)$", re.MULTILINE)
_SENTENCE = re.compile(rf"`((?:{'|'.join(map(re.escape, PROGRAMS))}) [^`]+)`")


def commands(message: object) -> list[str]:
    """Return the commands of a message: lines that are indented by four spaces, then those in a sentence."""
    text = str(message)
    return _LINE.findall(text) + _SENTENCE.findall(text)
