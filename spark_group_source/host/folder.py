"""The directory of this user's on one host, in which processes of ours find each other.

Runs in: every process. Deliberately absent: what the files say (``runs``, and the agents of executors). In the place of
the directory may be one, or a link, of somebody else's, because everybody can write to the temporary folder.
"""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

DIRECTORY = "spark-group-source"


def directory() -> Path:
    """Where the processes of this host and user publish."""
    return Path(tempfile.gettempdir()) / f"{DIRECTORY}-{os.getuid()}"


def trouble(folder: Path) -> str:
    """Why this directory must not be used: /tmp is everybody's. Empty if nothing speaks against it, or nothing is
    there."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return ""
    except OSError as exc:
        return f"{folder} cannot be looked at ({exc})"
    if not stat.S_ISDIR(status.st_mode):
        found = "it is a link" if stat.S_ISLNK(status.st_mode) else "it is not a directory"
    elif status.st_uid != os.getuid():
        found = f"it belongs to user {status.st_uid}"
    elif status.st_mode & 0o022:
        found = f"others can write to it (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return ""
    return f"{folder} is not this user's alone: {found}"


def write(path: Path, text: str) -> None:
    """Write a small file so that nobody reads half of it."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with contextlib.suppress(FileNotFoundError):
        part.unlink()  # whatever it is, and wherever it leads
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
