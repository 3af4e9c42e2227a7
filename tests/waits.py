"""Every wait of the product with its bound, found in the code. ``python -m tests.render`` writes docs/waits.md."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parent.parent / "spark_group_source"
BLOCKING = {
    "abort_transaction",
    "accept",
    "commit_transaction",
    "communicate",
    "consume",
    "flush",
    "init_transactions",
    "poll",
    "readline",
    "recv",
    "result",
    "select",
    "send_offsets_to_transaction",
    "sleep",
    "wait",
    "wait_for",
}
"""Methods that wait. ``join`` and ``get`` count for threads and queues only, ``commit`` and ``close`` for consumers of
the library, other calls if they have a timeout."""
DELEGATED = {"drain", "drain_runs", "Endpoint"}
"""Functions of the package with a timeout; the calls inside them are listed."""
TIMEOUTS = {"timeout", "request_timeout", "timeout_s", "wait_s"}
_NEVER_JOINED = "the consumer has no group to leave"
UNBOUNDED = {
    "agents.prefetch.server:PrefetchServer._accept accept": "the listener is closed when the agent ends",
    "agents.channel.wire:receive_exactly recv": "the timeout of the socket, which is the time left of the caller's",
    "local.broker:Node.__init__ readline": "the supervisor, a process of this package, writes a line or ends",
    "delta.topic_sinks:write_side_by_side result": "all have ended, each as the write of a single table",
    "local.supervise:main wait": "the child has ended, or was killed",
    "kafka.consumer:MemberConsumer.commit commit": "librdkafka ends it: after `session.timeout.ms` without a "
    "coordinator, or `socket.timeout.ms` without a response; the caller waits for "
    "{runtime.offset_commits.MEMBER_COMMIT_S_MAX}",
    "kafka.consumer:MemberConsumer.close close": "on the member's own thread; the run waits for it for "
    "{runtime.coordinator.CLOSE_S_MAX}",
    "kafka.admin:EpochEnds._read close": _NEVER_JOINED,
    "kafka.committer:memberless close": _NEVER_JOINED,
    "kafka.environment:check_settings close": _NEVER_JOINED,
    "kafka.group_offsets:RecordTimes.close close": _NEVER_JOINED,
}
"""Calls without an argument that bounds them, and what ends them."""
GIVEN = {
    "agents.channel.client:ChannelClient._connect wait": "{agents.channel.client.RETRY_S} Within the limit for "
    "connecting; after it a task reads from the brokers, and an agent tries again",
    "agents.channel.client:ChannelClient.receive poll": "an agent: {agents.hosted_members.RECEIVE_S} A task: "
    "{agents.task.ATTEMPT_S}",
    "agents.channel.server:ChannelPeer.serve wait_for": "5 s; then the connection is closed",
    "agents.channel.server:ChannelServer.stop join": "{agents.channel.server.STOP_S}",
    "agents.connected_agents:RemoteMember.wait_ended result": "{runtime.coordinator.CLOSE_S_MAX}",
    "agents.hosted_members:ControlConnection.stop wait": "{agents.main.MEMBERS_END_S} Then the process ends, and the "
    "members leave with their sessions",
    "agents.main:ProcessWatch.wait_ended poll": "{agents.main.CHECK_S}",
    "agents.prefetch.prefetcher:Prefetcher.stop join": "{agents.main.END_S} Then the process ends",
    "cli.group:_watch wait": "`--interval-s`, or a signal; then the next snapshot",
    "host.run_files:drain_runs wait": "{host.run_files.POLL_S} In all `--timeout-s`; then the command fails",
    "kafka.consumer:MemberConsumer.poll poll": "{members.POLL_S}",
    "kafka.environment:Environment.pause wait": "the pause between a bounded number of attempts; each is in this table "
    "or in the next one",
    "kafka.group_offsets:GroupOffsets._answers committed": "{kafka.group_offsets.READ_TIMEOUT_S}",
    "local.broker:Broker._end wait": "{local.broker.STOP_S}",
    "local.broker:Node.wait wait": "{local.broker.STOP_S}",
    "local.broker:connects create_connection": "1 s; then nothing listens there",
    "local.jars:locked wait": "the interval at which a lock is checked. In all {local.jars.RESOLVE_S} A lock of the "
    "local broker: {local.background.LOCK_S} Then the command fails",
    "members:Member.wait_ended join": "{runtime.coordinator.CLOSE_S_MAX} In an agent: "
    "{agents.hosted_members.CLOSE_S_MAX}",
    "metrics.groups:Exporter.run wait": "`--interval`, or a signal; then the next round",
}
"""What the caller gives as the bound, and what happens at its end. ``{module.NAME}`` is a bound of the package."""
_ENDS = UNBOUNDED | GIVEN
TIME = re.compile(r"_(S|MS)(_MAX|_MIN)?$")
"""Names of constants that are times."""


class Bound(NamedTuple):
    """A named bound."""

    value: str
    meaning: str


class Wait(NamedTuple):
    """A call that may wait."""

    place: str
    """``module:function``."""
    call: str
    bound: str
    """The argument, as in the code; empty: none."""
    constants: tuple[str, ...]
    """``module.NAME`` of the named bounds in it."""

    @property
    def name(self) -> str:
        """Its place and call."""
        return f"{self.place} {self.call}"


def modules() -> Iterator[tuple[str, ast.Module]]:
    """The modules of the package, by name without the package's."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        yield name, ast.parse(path.read_text())


@functools.cache
def bounds() -> dict[str, Bound]:
    """The named constants of all modules, by ``module.NAME``."""
    found = {}
    for module, tree in modules():
        for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if isinstance(target, ast.Name) and target.id.isupper():
                    found[f"{module}.{target.id}"] = Bound(ast.unparse(node.value), _text(after))
    return found


def _text(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


@functools.cache
def waits() -> list[Wait]:
    """Every call of the package that may wait."""
    known, found = bounds(), []
    for module, tree in modules():
        imported = {
            alias.asname or alias.name: f"{node.module.removeprefix('spark_group_source').strip('.')}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("spark_group_source")
            for alias in node.names
        }
        for function, call in _calls(tree, ""):
            bound = _bound(call)
            if bound is None:
                continue
            names = {ast.unparse(node) for node in ast.walk(call) if isinstance(node, ast.Name | ast.Attribute)}
            paths = {imported.get(name.split(".")[0], "") + "." + ".".join(name.split(".")[1:]) for name in names}
            paths |= {f"{module}.{name}" for name in names} | {imported.get(name, "") for name in names}
            constants = tuple(sorted(paths & known.keys()))
            method = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
            found.append(Wait(f"{module}:{function}", method, bound, constants))
    return found


def _calls(node: ast.AST, inside: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        name = inside
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{inside}.{child.name}".lstrip(".")
        if isinstance(child, ast.Call):
            yield name, child
        yield from _calls(child, name)


def _bound(call: ast.Call) -> str | None:
    """Return the argument that bounds a call, "" if there is none; None if the call does not wait."""
    limits = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg in TIMEOUTS]
    method, receiver = call.func.attr if isinstance(call.func, ast.Attribute) else "", _receiver(call)
    arguments = [ast.unparse(argument) for argument in call.args]
    waits_for = {
        "close": not call.keywords and ("consumer(" in receiver or receiver.endswith("consumer")),
        "commit": "asynchronous" in {keyword.arg for keyword in call.keywords},
        "join": receiver.endswith("thread"),
        "flush": receiver.endswith("producer"),
        "get": receiver.endswith(("queue", "commands")),
        "select": receiver == "select",
        "poll": receiver != "self" and bool(arguments),  # without arguments: of a process
    }
    if method in DELEGATED or not waits_for.get(method, method in BLOCKING or bool(limits)):
        return None
    bound = "" if method == "recv" else (limits or arguments or [""])[-1]  # its argument is a size
    return None if bound == "0" else bound


def _receiver(call: ast.Call) -> str:
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def call_rows() -> str:
    """One row for each wait: its bound, and what happens when it ends."""
    known, lines = bounds(), ["| wait | bound | meaning |", "|---|---|---|"]
    for wait in waits():
        text = _ENDS.get(wait.name) or " ".join(f"{{{name}}}" for name in wait.constants)
        meaning = re.sub(r"\{(.+?)\}", lambda at: _described(known[at[1]]), text)
        lines.append(f"| `{wait.place}`, {wait.call} | {f'`{wait.bound}`' if wait.bound else 'none'} | {meaning} |")
    return "\n".join(lines) + "\n"


def _described(bound: Bound) -> str:
    return f"{bound.value}: {bound.meaning}"


def time_rows() -> str:
    """One row for each named time that no call has as its argument: limits of several calls, intervals, ages."""
    known, used = bounds(), {name for wait in waits() for name in wait.constants}
    lines = ["| constant | value | meaning |", "|---|---|---|"]
    lines += [f"| `{name}` | {known[name].value} | {known[name].meaning} |" for name in times() if name not in used]
    return "\n".join(lines) + "\n"


def times() -> list[str]:
    """The named constants that are times."""
    return [name for name in bounds() if TIME.search(name)]
