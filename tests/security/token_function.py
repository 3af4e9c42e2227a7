"""A token function for ``kafka.oauth_cb``. Spark's processes get this file like a user's file.

Runs in: tests, and the processes of their queries. Deliberately absent: imports outside the standard
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
"""Has the path of a file; while the file exists, no tokens are issued."""


def token(_: str) -> tuple[str, float]:
    """Return a token, like the signer of a cloud provider."""
    if (away := os.environ.get(AWAY_ENV)) and Path(away).exists():
        raise ConnectionError("the signer does not respond")
    return unsigned(float(os.environ.get(LIFE_ENV, "600")))


def unsigned(life_s: float) -> tuple[str, float]:
    """Return an unsigned token (JWS with ``alg`` none) and its expiry."""
    now = time.time()
    parts = {"alg": "none"}, {"sub": CLIENT_ID, "iat": now, "exp": now + life_s, "scope": ""}
    header, claims = (base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
    return f"{header}.{claims}.", now + life_s
