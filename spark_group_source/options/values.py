"""The texts of options, read into values.

Runs in: every process. Deliberately absent: which option takes what (``options``) and the starting positions
(``starting``). Each reader raises ValueError with what would be right; the option's name and value are added by
``options``, which knows whether the value may be shown.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

INT64_MAX: Final = 2**63 - 1

_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_MEMORY = re.compile(r"([0-9]{1,19})([kmg]?)b?")
_MEMORY_SHIFTS: Final[Mapping[str, int]] = {"": 0, "k": 10, "m": 20, "g": 30}
_TIME = re.compile(r"([0-9]{1,19})([a-z]+)?")
_TIME_UNITS_US: Final[Mapping[str, int]] = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "min": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}


def whole(at_least: int, at_most: int = INT64_MAX) -> Callable[[str], int]:
    """A reader of whole numbers within [at_least, at_most]."""

    def parse(text: str) -> int:
        # Not int() alone: it also takes "1_000" and digits of other scripts.
        if not re.fullmatch(r"[+-]?[0-9]{1,19}", text.strip()) or not at_least <= int(text) <= at_most:
            raise ValueError(f"it must be a whole number from {at_least} to {at_most}")
        return int(text)

    return parse


def one_of(*words: str) -> Callable[[str], str]:
    """A reader of one of these words, in any case."""

    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ValueError(f"it must be {' or '.join(words)}{did_you_mean(word, words)}")
        return word

    return parse


def flag(text: str) -> bool:
    """true or false, in any case."""
    word = text.strip().lower()
    if word not in ("true", "false"):
        raise ValueError("it must be true or false")
    return word == "true"


def non_empty(text: str) -> str:
    """Any text but blanks, without the blanks around it."""
    if not text.strip():
        raise ValueError("it must not be empty")
    return text.strip()


def variable(text: str) -> str:
    """The name of an environment variable."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text.strip()):
        raise ValueError("it must be the name of an environment variable, such as RACK")
    return text.strip()


def servers(text: str) -> str:
    """A list of brokers, without blanks."""
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise ValueError("it must be a comma-separated list of host:port")
    return ",".join(items)


def topics(text: str) -> tuple[str, ...]:
    """A list of topics in the order given, each once. A name that the client would read as a pattern is refused."""
    names = tuple(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))
    if not names:
        raise ValueError("it must name at least one topic")
    for name in names:
        if not _TOPIC_NAME.fullmatch(name) or name in (".", ".."):
            raise ValueError(
                f"{name!r} is not a topic name (letters, digits, '.', '_' and '-', at most 249); "
                "for a pattern use subscribePattern"
            )
    return names


def pattern(text: str) -> str:
    """A regular expression that Python can compile."""
    if not text.strip():
        raise ValueError("it must not be empty")
    try:
        re.compile(text.strip())
    except (re.error, RecursionError, OverflowError) as exc:
        raise ValueError(f"it must be a regular expression as Python's re reads it ({exc})") from None
    return text.strip()


def time_ms(text: str) -> int:
    """Milliseconds from a time as Spark writes it: a number and us, ms, s, m, min, h or d; no unit is ms."""
    match = _TIME.fullmatch(text.strip().lower())
    unit_us = _TIME_UNITS_US.get(match[2] or "ms") if match else None
    if match is None or unit_us is None or int(match[1]) * unit_us // 1_000 > INT64_MAX:
        raise ValueError("it must be a time such as 500ms, 10s, 15m, 1h or 1d; a plain number is milliseconds")
    return int(match[1]) * unit_us // 1_000


def members(at_most: int) -> Callable[[str], int | str]:
    """A reader of a number from 1 on, or the word auto."""
    number = whole(1, at_most)

    def parse(text: str) -> int | str:
        try:
            return "auto" if text.strip().lower() == "auto" else number(text)
        except ValueError as exc:
            raise ValueError(f"{exc}, or auto") from None

    return parse


def memory_bytes(at_least: int, at_most: int) -> Callable[[str], int]:
    """A reader of sizes as Spark writes them: a number and k, m or g; no unit is bytes."""

    def parse(text: str) -> int:
        match = _MEMORY.fullmatch(text.strip().lower())
        size = int(match[1]) << _MEMORY_SHIFTS[match[2] or ""] if match else -1
        if not at_least <= size <= at_most:
            raise ValueError(f"it must be a size such as 512k, 64m or 1g, from {at_least} to {at_most} bytes")
        return size

    return parse


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the nearest known name, or an empty text. Case does not count."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""
