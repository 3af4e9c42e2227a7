"""An S3 server on loopback, and tables in it as Spark, ``deltalake`` and tests address them.

Runs in: tests. Deliberately absent: what writes the tables. The server is moto's, in this process. It serves one
request at a time: S3 decides a conditional PUT and stores the object in one step, and moto in two.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spark_group_source.local import jars

BUCKET = "lake"
REGION = "us-east-1"
KEY = {"id": "tests", "secret": "not-a-secret"}
HADOOP_AWS = "3.5.0"
"""The version of Hadoop that Spark contains."""
AWS_SDK = "2.35.4"
"""The version that this Hadoop is built with. Its ``bundle`` of all services has 600 MB."""
PAGE_S = 120

App = Callable[..., Iterable[bytes]]


class ObjectStore:
    """A running server with one bucket."""

    def __init__(self, port: int) -> None:
        import boto3

        self.endpoint = f"http://127.0.0.1:{port}"
        self._client: Any = boto3.client(
            "s3", endpoint_url=self.endpoint, region_name=REGION,
            aws_access_key_id=KEY["id"], aws_secret_access_key=KEY["secret"],
        )  # fmt: skip
        self._client.create_bucket(Bucket=BUCKET)

    @property
    def spark_settings(self) -> dict[str, str]:
        """Settings of a session that has ``s3a://``."""
        return {
            "spark.jars": ",".join(map(str, s3a_jars())),
            "spark.hadoop.fs.s3a.endpoint": self.endpoint,
            "spark.hadoop.fs.s3a.endpoint.region": REGION,
            "spark.hadoop.fs.s3a.path.style.access": "true",
            "spark.hadoop.fs.s3a.access.key": KEY["id"],
            "spark.hadoop.fs.s3a.secret.key": KEY["secret"],
        }

    @property
    def storage_options(self) -> dict[str, str]:
        """The same for ``deltalake``."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": KEY["id"],
            "AWS_SECRET_ACCESS_KEY": KEY["secret"],
        }

    def uri(self, name: str) -> str:
        return f"s3a://{BUCKET}/{name}"

    def objects(self, name: str) -> dict[str, int]:
        """The objects below a folder of the bucket, with their sizes."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{name}/")
        return {one["Key"]: one["Size"] for page in pages for one in page.get("Contents", ())}

    def download(self, name: str, folder: Path) -> None:
        """Copy what is below a folder of the bucket, unless it is there: files of a table never change. Spark deletes
        its temporary ones, also between the listing and the copy."""
        for key in self.objects(name):
            place = folder / key.removeprefix(f"{name}/")
            if not place.exists() and not key.endswith("/"):
                place.parent.mkdir(parents=True, exist_ok=True)
                part = place.with_name(f".{place.name}.{threading.get_ident()}")
                try:
                    part.write_bytes(self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
                except self._client.exceptions.NoSuchKey:
                    continue
                part.replace(place)


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Run a server until the block ends."""
    moto, serving = pytest.importorskip("moto.server"), pytest.importorskip("werkzeug.serving")
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it logs each request
    app, one = moto.DomainDispatcherApplication(moto.create_backend_app), threading.Lock()

    def serve(environ: Any, start_response: Any) -> Any:
        with one:
            return app(environ, start_response)

    server = serving.make_server("127.0.0.1", 0, serve, threaded=True)
    thread = threading.Thread(target=server.serve_forever, name="S3")
    thread.start()
    try:
        yield ObjectStore(server.port)
    finally:
        server.shutdown()
        thread.join(PAGE_S)


def s3a_jars() -> list[Path]:
    """The jars of Hadoop's S3 client, without those that Spark contains."""
    sdk = [f"software.amazon.awssdk:{name}:{AWS_SDK}" for name in ("s3", "s3-transfer-manager", "sts", "apache-client")]
    exclude = ("software.amazon.awssdk:bundle", *jars._sparks_modules())
    found = jars.resolve((f"org.apache.hadoop:hadoop-aws:{HADOOP_AWS}", *sdk), exclude=exclude, mb=20)
    return jars._without_sparks(found)
