"""A function as ``kafka.oauth_cb`` names one. Spark's processes get this file as they get a user's.

Runs in: tests, and the processes of their queries. Deliberately absent: imports of anything beside the standard
library.
"""

import base64
import json
import os
import time

SUBJECT = "etl-service"
LIFE_ENV = "TOKEN_LIFE_S"


def token(_: str) -> tuple[str, float]:
    """A token that nobody signed, and when it expires: as a signer of a cloud gives it."""
    now = time.time()
    until = now + float(os.environ.get(LIFE_ENV, "600"))
    parts = {"alg": "none"}, {"sub": SUBJECT, "iat": now, "exp": until, "scope": ""}
    header, claims = (base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
    return f"{header}.{claims}.", until
