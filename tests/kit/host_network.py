"""Hosts of one cluster on one Linux machine: each has a network, a name and folders of its own.

Runs in: tests, as root. A host is a network namespace with one address. A bridge joins it with the other hosts and with
this machine. Deliberately absent: the programs that run on hosts, slow networks (``slow_network``).
"""

import contextlib
import functools
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from kafka_helpers import await_until

COMMAND_S = 60
"""Bound of one command of iproute2, and of the end of a host's processes."""
NETWORKS_MAX = 250
"""Networks of this kind that one machine can have at a time."""
FIRST_ADDRESS = 10
ENTER = """
hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 || exit 1
while [ "$1" != -- ]; do mount -t tmpfs -o ro none "$1" && shift || exit 1; done
shift
exec "$@"
"""
"""Runs a command on a host. Its arguments: the host's name, the file of all names, hidden folders, ``--``, the command.
"""


@functools.cache
def obstacle() -> str:
    """Why this machine, or this user, cannot have such hosts; empty if it can."""
    if os.getuid() != 0:
        return "a network of hosts needs root"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with HostNetwork(Path(folder)) as network:
                network.add("probe").run("true", bound_s=COMMAND_S)
        except (OSError, RuntimeError) as exc:
            return f"no network of hosts: {exc}"
    return ""


class HostNetwork:
    """A network of hosts.

    Args:
        home: an existing folder that all hosts have. The folder of each host is in it, and hidden from the others.
        hidden: existing folders of this machine that no host has.
    """

    def __init__(self, home: Path, hidden: Sequence[Path] = ()) -> None:
        self.home, self.names = home, home / "hosts"
        self.hidden = tuple(hidden)
        self.hosts: list[Host] = []
        self.number = 0

    def __enter__(self) -> Self:
        self.names.write_text("127.0.0.1 localhost\n")
        for self.number in range(NETWORKS_MAX):
            try:
                _ip("link", "add", self.bridge, "type", "bridge")
                break
            except RuntimeError as exc:
                if "File exists" not in str(exc):  # another test has this number
                    raise
        else:
            raise RuntimeError(f"{NETWORKS_MAX} networks of hosts are there; remove them with `ip link delete NAME`")
        _ip("address", "add", f"{self.address}/24", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.close()
        _ip("link", "delete", self.bridge)

    @property
    def bridge(self) -> str:
        return f"sparkgroup{self.number}"

    @property
    def address(self) -> str:
        """The address of this machine in the network."""
        return f"10.213.{self.number}.1"

    def add(self, name: str) -> "Host":
        """Add a host. All hosts find it by its name."""
        host = Host(self, name, len(self.hosts))
        self.hosts.append(host)
        (host.home / "tmp").mkdir(parents=True)
        _ip("netns", "add", host.namespace)
        _ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        _ip("link", "set", host.link, "master", self.bridge, "up")
        inside = ("-n", host.namespace)
        _ip(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _ip(*inside, "link", "set", link, "up")
        with self.names.open("a") as names:
            names.write(f"{host.address} {name}\n")
        return host


class Host:
    """A host: its processes reach the other hosts and this machine, and nothing else."""

    def __init__(self, network: HostNetwork, name: str, number: int) -> None:
        self.name, self.home, self._network = name, network.home / name, network
        self.address = f"10.213.{network.number}.{FIRST_ADDRESS + number}"
        self._started: list[subprocess.Popen[bytes]] = []
        self.namespace, self.link = f"{network.bridge}-{number}", f"{network.bridge}-{number}"

    def command(self, *words: str) -> list[str]:
        """The command line that runs a command on this host."""
        others = [host.home for host in self._network.hosts if host is not self]
        hidden = map(str, (*self._network.hidden, *others))
        enter = ["unshare", "--uts", "--mount", "sh", "-c", ENTER, "sh", self.name, str(self._network.names)]
        return ["ip", "netns", "exec", self.namespace, *enter, *hidden, "--", *words]

    def start(self, *words: str, log: Path, environment: Mapping[str, str] | None = None) -> "subprocess.Popen[bytes]":
        """Start a command on this host, with its output in a file. The process id is that of the command."""
        with log.open("ab") as output:
            started = subprocess.Popen(self.command(*words), stdout=output, stderr=output, **self._place(environment))
        self._started.append(started)
        return started

    def run(self, *words: str, bound_s: float, environment: Mapping[str, str] | None = None) -> str:
        """Run a command on this host to its end; returns its output.

        Raises:
            RuntimeError: it failed.
        """
        return _run(self.command(*words), bound_s, **self._place(environment))

    def kill(self) -> None:
        """Lose the host as with its power: no other host receives another packet from it, and its processes end."""
        _ip("link", "set", self.link, "down")
        self._end_processes()

    def pids(self) -> list[int]:
        """The processes of this host."""
        return [int(line) for line in _ip("netns", "pids", self.namespace).split()]

    def close(self) -> None:
        """Kill the host's processes and remove it."""
        self._end_processes()
        _ip("link", "delete", self.link)  # the end of the namespace would delete it a while later
        _ip("netns", "delete", self.namespace)

    def _place(self, environment: Mapping[str, str] | None) -> dict[str, Any]:
        return {"cwd": self.home, "env": {**os.environ, "TMPDIR": str(self.home / "tmp"), **(environment or {})}}

    def _end_processes(self) -> None:
        def ended() -> bool:
            pids = self.pids()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not pids

        await_until(ended, COMMAND_S, what=f"the end of all processes of host {self.name}")
        for process in self._started:
            process.wait(COMMAND_S)


def _ip(*words: str) -> str:
    return _run(["ip", *words], COMMAND_S)


def _run(command: list[str], bound_s: float, **more: Any) -> str:
    ended: subprocess.CompletedProcess[str] = subprocess.run(
        command, capture_output=True, text=True, timeout=bound_s, check=False, **more
    )
    if ended.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return ended.stdout
