"""``python -m tests.bench [name [arguments]]`` runs the ``main`` of ``tests/bench/<name>.py``, or every one in turn."""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the modules of the tests are found as pytest finds them


def _run(arguments: list[str]) -> int:
    names = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    if arguments and arguments[0] not in names:
        print(f"usage: python -m {__package__} {{{','.join(names)}}} [arguments]", file=sys.stderr)
        return 2
    failed = 0
    for name in arguments[:1] or names:
        print(f"== {name}", flush=True)
        failed |= int(importlib.import_module(f"{__package__}.{name}").main(arguments[1:]) or 0)
    return failed


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1:]))
