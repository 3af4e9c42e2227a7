"""A function as ``kafka.oauth_cb`` names one. Spark's processes get this file as they get a user's.

Runs in: tests, and the processes of their queries. Deliberately absent: imports of anything beside the standard
library.
"""

import base64
import json
import os
import time
from pathlib import Path

CLIENT_ID = "etl-service"
LIFE_ENV = "TOKEN_LIFE_S"
AWAY_ENV = "TOKENS_AWAY"
"""Names a file: while it is there, nobody gives tokens."""


def token(_: str) -> tuple[str, float]:
    """What a signer of a cloud would give."""
    if (away := os.environ.get(AWAY_ENV)) and Path(away).exists():
        raise ConnectionError("the signer does not answer")
    return unsigned(float(os.environ.get(LIFE_ENV, "600")))


def unsigned(life_s: float) -> tuple[str, float]:
    """A token that nobody signed (JWS with ``alg`` none), and when it expires."""
    now = time.time()
    parts = {"alg": "none"}, {"sub": CLIENT_ID, "iat": now, "exp": now + life_s, "scope": ""}
    header, claims = (base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
    return f"{header}.{claims}.", now + life_s
