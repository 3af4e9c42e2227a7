"""A function as ``kafka.oauth_cb`` names one. Spark's processes get this file as they get a user's.

Runs in: tests, and the processes of their queries. Deliberately absent: imports of anything beside the standard
library.
"""

import base64
import json
import os
import time
from pathlib import Path

SUBJECT = "etl-service"
LIFE_ENV = "TOKEN_LIFE_S"
AWAY_ENV = "TOKENS_AWAY"
"""Names a file: while it is there, nobody gives tokens."""


def token(_: str) -> tuple[str, float]:
    """A token that nobody signed, and when it expires: as a signer of a cloud gives it."""
    if (away := os.environ.get(AWAY_ENV)) and Path(away).exists():
        raise ConnectionError("the signer does not answer")
    now = time.time()
    until = now + float(os.environ.get(LIFE_ENV, "600"))
    parts = {"alg": "none"}, {"sub": SUBJECT, "iat": now, "exp": until, "scope": ""}
    header, claims = (base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
    return f"{header}.{claims}.", until
