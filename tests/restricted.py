"""Run a Python program as a restricted platform runs it.

Runs in: processes that tests start, in place of Python: :func:`command` is their command line. Deliberately absent:
fixtures and assertions. Each restriction is the operating system's: mount namespaces, users, limits, a seccomp filter.
They apply to the process and to all that it starts. In this order, because each makes the next ones impossible: mounts,
user, limit, filter.
"""

import contextlib
import ctypes
import functools
import os
import resource
import runpy
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

NO_PROC = "no /proc"
READ_ONLY = "read-only root"
"""All of the file system but the given folders."""
OTHER_USER = "other user"
"""A user with no other process, who can read all files, as on a platform where Python is installed for everybody."""
PIDS_LIMIT = "pids limit"
"""At most :data:`PIDS_MAX` threads of all processes of this user. The limit does not apply to root."""
PIDS_MAX = 256
NO_EXEC = "no exec"
"""No program can be started: EPERM."""

NEEDS_ROOT = {NO_PROC, READ_ONLY, OTHER_USER}
FIRST_USER = 100_000
CLONE_NEWNS, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 0x20000, 22, 38, 2
PR_SET_KEEPCAPS, CAPABILITY_VERSION, CAP_DAC_READ_SEARCH = 8, 0x20080522, 1 << 2
EXECVE = {"x86_64": (59, 322), "aarch64": (221, 281)}
"""The numbers of execve and execveat."""
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, EPERM = 0x7FFF0000, 0x00050001


def command(restrictions: Iterable[str], *arguments: str, writable: Iterable[Path] = ()) -> list[str]:
    """The command line that runs Python with these arguments: a file, ``-c`` or ``-m``.

    Args:
        restrictions: their names.
        writable: existing folders that can be written with a read-only root.
    """
    folders = os.pathsep.join(map(str, writable))
    return [sys.executable, str(Path(__file__)), ",".join(restrictions), folders, *arguments]


@functools.cache
def obstacle(restriction: str) -> str:
    """Why this operating system, or this user, cannot apply a restriction; empty if it can."""
    if restriction in NEEDS_ROOT and os.getuid() != 0:
        return f"{restriction}: needs root"
    if restriction == NO_EXEC and os.uname().machine not in EXECVE:
        return f"{restriction}: no system call numbers for {os.uname().machine}"
    tried = subprocess.run(command([restriction], "-c", ""), capture_output=True, text=True, check=False)
    return f"{restriction}: {tried.stderr.strip()[-300:]}" if tried.returncode else ""


def limit_threads(more: int) -> None:
    """Let all processes of this user start only so many further threads, or processes, which have one at least."""
    counted = more
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid():
                counted += len(list((path / "task").iterdir()))
    resource.setrlimit(resource.RLIMIT_NPROC, (counted, counted))


def become_user() -> None:
    """Let this process, a fork of root's, go on as a user with no other process, who can read all files."""
    user = FIRST_USER + os.getpid()
    _call("prctl", PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    header = struct.pack("Ii", CAPABILITY_VERSION, 0)
    _call("capset", header, struct.pack("6I", CAP_DAC_READ_SEARCH, CAP_DAC_READ_SEARCH, 0, 0, 0, 0))


def _main() -> None:
    names, folders, *arguments = sys.argv[1:]
    wanted = set(filter(None, names.split(",")))
    if wanted & {NO_PROC, READ_ONLY}:
        _call("unshare", CLONE_NEWNS)
        _mount("--make-rprivate", "/")
    if READ_ONLY in wanted:
        _make_read_only(list(filter(None, folders.split(os.pathsep))))
    if NO_PROC in wanted:
        _mount("-t", "tmpfs", "-o", "ro", "none", "/proc")
    if OTHER_USER in wanted:
        _become_other_user(",".join(wanted - {NO_PROC, READ_ONLY, OTHER_USER}), folders, arguments)
    if PIDS_LIMIT in wanted:
        resource.setrlimit(resource.RLIMIT_NPROC, (PIDS_MAX, PIDS_MAX))
    if NO_EXEC in wanted:
        _forbid_exec()
    _run(arguments)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _make_read_only(writable: list[str]) -> None:
    for folder in writable:
        _mount("--bind", folder, folder)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, options = line.split()[4:6]
        if "rw" in options.split(",") and place not in writable and not place.startswith(("/proc", "/sys", "/dev")):
            _mount("-o", "remount,bind,ro", place)


def _become_other_user(rest: str, folders: str, arguments: list[str]) -> None:
    user = FIRST_USER + os.getpid()  # no other living process has it
    given = [f"--reuid={user}", f"--regid={user}", "--clear-groups", "--inh-caps=+dac_read_search"]
    program = [sys.executable, __file__, rest, folders, *arguments]
    found = shutil.which("setpriv")
    if found is None:
        raise FileNotFoundError("setpriv")
    os.execv(found, ["setpriv", *given, "--ambient-caps=+dac_read_search", *program])


def _forbid_exec() -> None:
    execve, execveat = EXECVE[os.uname().machine]
    code = [
        (LOAD, 0, 0, 0),  # the number of the system call
        (JUMP_IF_EQUAL, 1, 0, execve),
        (JUMP_IF_EQUAL, 0, 1, execveat),
        (RETURN, 0, 0, EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    program = Program(len(code), ctypes.addressof(instructions))
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _run(arguments: list[str]) -> None:
    match arguments:
        case ["-c", code, *rest]:
            sys.argv = ["-c", *rest]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [file, *rest]:
            sys.argv = [file, *rest]
            sys.path[0] = str(Path(file).parent)
            runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    _main()
