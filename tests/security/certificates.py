"""Certificates of a test's own authorities, created with the ``openssl`` command.

Runs in: tests. Deliberately absent: files outside the test's folder.
"""

import subprocess
from pathlib import Path

_CURVE = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
BROKER_NAMES = "subjectAltName=IP:127.0.0.1,DNS:localhost"


class Authority:
    """Signs certificates. ``ca``: the file that clients trust."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = _key(folder / f"{name}.key")
        self.ca = folder / f"{name}.pem"
        _run("req", "-x509", "-key", self._key, "-subj", f"/CN={name}", "-days", "2", "-out", self.ca)

    def issue(self, name: str, *, days: int = 2, names: str = "") -> Path:
        """Create a file with a private key and its certificate for ``CN=name``; with 0 days it is expired at once."""
        there = self._folder / f"{name}.pem"
        key, request, extensions = _key(there.with_suffix(".key")), there.with_suffix(".csr"), there.with_suffix(".ext")
        extensions.write_text(f"basicConstraints=CA:FALSE\n{names}\n")
        _run("req", "-new", "-key", key, "-subj", f"/CN={name}", "-out", request)
        signed = there.with_suffix(".crt")
        _run(
            *("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._key, "-CAcreateserial"),
            *("-days", days, "-extfile", extensions, "-out", signed),
        )
        there.write_text(key.read_text() + signed.read_text())
        return there


def _key(path: Path) -> Path:
    _run("genpkey", *_CURVE, "-out", path)
    return path


def _run(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=300)
