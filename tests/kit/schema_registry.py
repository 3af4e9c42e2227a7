"""A schema registry on loopback: the documented REST calls that clients, serializers and the decoder use.

https://docs.confluent.io/platform/current/schema-registry/develop/api.html. Deliberately absent: checks of
compatibility, and what it keeps after it stops.
"""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

CONTENT_TYPE = "application/vnd.schemaregistry.v1+json"


class _RefusedRequest(Exception):
    """Status, error code and text of the answer."""


_NO_SUBJECT = _RefusedRequest(404, 40401, "Subject not found.")
_NO_VERSION = _RefusedRequest(404, 40402, "Version not found.")
_NO_SCHEMA = _RefusedRequest(404, 40403, "Schema not found.")


class SchemaRegistry:
    """Serves from construction to :meth:`stop`.

    Args:
        user: ``name:password`` that every request must have.
        token: the bearer token that every request must have.
    """

    def __init__(self, *, user: str = "", token: str = "") -> None:
        self.required = f"Basic {base64.b64encode(user.encode()).decode()}" if user else ""
        self.required = f"Bearer {token}" if token else self.required
        self.requests: list[str] = []
        """Method and path of each."""
        self.is_down = threading.Event()
        """While it is set, requests are answered with 503."""
        self.refused = threading.Event()
        """Set by the first of these requests."""
        self._schemas: list[dict[str, Any]] = []
        self._subjects: dict[str, dict[int, int]] = {}
        """The ids by version, by subject."""
        self._deleted: set[tuple[str, int]] = set()
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = registry._answer(self.command, self.path, dict(self.headers), body)
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_DELETE = _answer  # the names of http.server

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def __enter__(self) -> "SchemaRegistry":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop; it then refuses connections."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @contextmanager
    def down(self) -> Iterator[threading.Event]:
        """Answer with 503 inside the block; the event is set by the first of these answers."""
        self.refused.clear()
        self.is_down.set()
        try:
            yield self.refused
        finally:
            self.is_down.clear()

    def _answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        self.requests.append(f"{method} {path}")
        if self.is_down.is_set():
            self.refused.set()
            return 503, {"error_code": 503, "message": "down"}
        if headers.get("Authorization", headers.get("authorization", "")) != self.required:
            return 401, {"error_code": 401, "message": "Unauthorized"}
        url = urlsplit(path)
        with_deleted = parse_qs(url.query).get("deleted") == ["true"]
        try:
            match method, *(unquote(part) for part in url.path.strip("/").split("/")):
                case "POST", "subjects", subject, "versions":
                    return 200, {"id": self._register(subject, json.loads(body))}
                case "POST", "subjects", subject:
                    return 200, self._find(subject, json.loads(body))
                case "GET", "subjects", subject, "versions":
                    return 200, self._versions(subject, with_deleted)
                case "GET", "subjects", subject, "versions", version:
                    return 200, self._version(subject, version, with_deleted)
                case "DELETE", "subjects", subject, "versions", version:
                    self._version(subject, version, with_deleted=False)
                    self._deleted.add((subject, int(version)))
                    return 200, int(version)
                case "GET", "schemas", "ids", schema_id:
                    if not 0 < int(schema_id) <= len(self._schemas):
                        raise _NO_SCHEMA
                    return 200, self._schemas[int(schema_id) - 1]
            raise _RefusedRequest(404, 404, "HTTP 404 Not Found")
        except _RefusedRequest as refused:
            status, code, message = refused.args
            return status, {"error_code": code, "message": message}

    def delete_permanently(self, subject: str, *versions: int) -> None:
        for version in versions:
            del self._subjects[subject][version]

    def _register(self, subject: str, given: dict[str, Any]) -> int:
        schema = {key: given[key] for key in ("schema", "schemaType", "references") if given.get(key)}
        if schema not in self._schemas:
            self._schemas.append(schema)
        schema_id = self._schemas.index(schema) + 1
        versions = self._subjects.setdefault(subject, {})
        if schema_id not in versions.values():
            versions[max(versions, default=0) + 1] = schema_id
        return schema_id

    def _find(self, subject: str, given: dict[str, Any]) -> dict[str, Any]:
        schema = {key: given[key] for key in ("schema", "schemaType", "references") if given.get(key)}
        for version in self._versions(subject, with_deleted=False):
            if self._schemas[self._subjects[subject][version] - 1] == schema:
                return self._version(subject, str(version), with_deleted=False)
        raise _NO_SCHEMA

    def _versions(self, subject: str, with_deleted: bool) -> list[int]:
        found = [v for v in self._subjects.get(subject, {}) if with_deleted or (subject, v) not in self._deleted]
        if not found:
            raise _NO_SUBJECT
        return found

    def _version(self, subject: str, version: str, with_deleted: bool) -> dict[str, Any]:
        known = self._versions(subject, with_deleted)
        number = max(known) if version == "latest" else int(version)
        if number not in known:
            raise _NO_VERSION
        schema_id = self._subjects[subject][number]
        return {"subject": subject, "version": number, "id": schema_id, **self._schemas[schema_id - 1]}
