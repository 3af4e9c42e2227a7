"""``python -m tests.simulation SEED [PROTOCOL [agents]]`` runs one history and prints its outcome.

``python -m tests.simulation table FROM TO [PROTOCOL [agents]]`` runs many, of every protocol unless one is named, and
prints how many met each kind of fault and trouble. It exits with 1 if a history fails.
"""

import gc
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' modules are found as by pytest

from kit.simulation import PROTOCOLS, Failed, run
from kit.troubles import Troubles

GARBAGE_MAX = 20_000
"""Objects between two garbage collections; a history leaves about as many."""


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["table"] and len(arguments) > 2:
        return table(range(int(arguments[1]), int(arguments[2])), arguments[3:4], agents="agents" in arguments[4:])
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


def table(seeds: range, protocols: list[str], *, agents: bool) -> int:
    """Run histories; print how many failed, and how many met each kind of event."""
    gc.freeze()  # the modules are no garbage: a history takes a tenth less time
    gc.set_threshold(GARBAGE_MAX)
    met = Counter(dict.fromkeys(Troubles.kinds(), 0))
    played, failures = 0, []
    for seed in seeds:
        for protocol in protocols or PROTOCOLS:
            played += 1
            try:
                outcome = run(seed, protocol=protocol, agents=agents)
            except Failed as failed:
                failures.append(str(failed).splitlines()[-1])
            else:
                met.update({kind for kind, count in (outcome.faults | outcome.troubles).items() if count})
    for kind, count in sorted(met.items(), key=lambda pair: pair[1]):
        sys.stdout.write(f"{count:>7} {count / played:>6.1%} {kind}\n")
    sys.stdout.write("\n".join([f"{played} histories, {len(failures)} failed", *failures]) + "\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
