"""``python -m tests.simulation SEED [PROTOCOL [agents]]`` runs one history and prints its outcome."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' modules are found as by pytest

from kit.simulation import Failed, run


def main(arguments: list[str]) -> int:
    if not arguments or not arguments[0].isdigit():
        sys.stderr.write(f"{__doc__}\n")
        return 2
    try:
        protocol = arguments[1] if len(arguments) > 1 else None
        outcome = run(int(arguments[0]), protocol=protocol, agents="agents" in arguments[2:])
    except Failed as failed:
        sys.stdout.write(f"{failed}\n")
        return 1
    sys.stdout.write(f"{outcome}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
