"""Decoders for the values of records: Avro with a schema registry, and Debezium's changes.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: reading
a row in Python. The registry is asked for schemas only, and Spark decodes the rows, by expressions that are built here.

Each schema of a subject is a branch of one expression. The subject's versions are listed for each batch, after its
records were produced, so an id that a producer registered for a record is known, without looking at the records first.
"""

import base64
import hashlib
import json
import logging
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from spark_group_source import compatibility
from spark_group_source.errors import OptionError, RegistryUnavailable, SetupError

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import RegisteredSchema, SchemaRegistryClient
    from pyspark.sql import Column, DataFrame

log = logging.getLogger(__name__)

WAIT_S = 120.0
"""How long a batch waits by default for a registry that does not answer."""
RETRY_S = 1.0
"""The pause before a registry is asked again."""
VERSIONS_MAX = 200
"""How many versions a subject may have: Spark needs about 5 ms more for the plan of a batch with each."""
REFERENCES_MAX = 100
"""How many other schemas one schema may use, directly or not."""

T = TypeVar("T")

_MAGIC = b"\0"
_ALL = 2**31 - 1
_NAMED = frozenset({"record", "error", "enum", "fixed"})
_PRIMITIVE = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_PREFIX, _DECODED, _MARKER = "__prefix", "__decoded", "__is_decoded"
UNAVAILABLE = "__debezium_unavailable_value"
"""What Debezium sends in place of a large value that a change did not touch and the database did not log."""

_UNAVAILABLE_64 = base64.b64encode(UNAVAILABLE.encode()).decode()
_UNAVAILABLE_NUMBERS = ",".join(map(str, UNAVAILABLE.encode()))
"""As elements of an array of numbers."""
_UNAVAILABLE_JSON = f'{{"{UNAVAILABLE}":"{UNAVAILABLE}"}}'
"""As hstore in JSON."""
_UNAVAILABLE_UUID = str(uuid.UUID(bytes=hashlib.md5(UNAVAILABLE.encode(), usedforsecurity=False).digest(), version=3))
"""As the element of an array of UUIDs."""
_UNAVAILABLE_ALL = (UNAVAILABLE, _UNAVAILABLE_64, _UNAVAILABLE_NUMBERS, _UNAVAILABLE_JSON, _UNAVAILABLE_UUID)
_ENVELOPE, _ROW = "__envelope", "__row"
_CHANGES = ("c", "u", "r")
"""Debezium's operations after which there is a row: created, updated, read by a snapshot."""
_MISSING = 404
_REFUSED = {401: "the credentials were refused", 403: "the user lacks the permission", _MISSING: "it does not exist"}
_AGAIN = frozenset({408, 425, 429})


class WriterSchema(NamedTuple):
    """A version of a subject."""

    id: int
    """The id that its records begin with."""
    version: int
    text: str
    """In JSON, with the definitions of all types that it uses."""


class Registry:
    """A Confluent schema registry, or one with its REST interface.

    Args:
        conf: its URL, or the settings of ``confluent_kafka.schema_registry.SchemaRegistryClient``: ``url``,
            ``basic.auth.user.info``, ``bearer.auth.credentials.source``, ``bearer.auth.token``, ``ssl.ca.location``,
            ``ssl.certificate.location``, ``ssl.key.location``, ``timeout`` (seconds) and others.
        wait_s: how long a batch waits for a registry that does not answer, from 0 s on.

    Raises:
        OptionError: a setting is wrong.
        SetupError: the client's packages are missing.
    """

    def __init__(self, conf: str | Mapping[str, Any], *, wait_s: float = WAIT_S) -> None:
        if wait_s < 0:
            raise OptionError(f"wait_s is {wait_s}; it must be 0 or more")
        given = {"url": conf} if isinstance(conf, str) else dict(conf)
        self._conf = {"timeout": 10, **_without_credentials(given), "max.retries": 0}  # this class retries
        self._wait_s = wait_s
        self._versions: dict[str, dict[int, WriterSchema]] = {}
        """By subject and version. One stays the same until it is deleted permanently: then the next one has its
        number."""
        self._connect()

    def _connect(self) -> None:
        self._client, self._lock = _new_client(self._conf), threading.Lock()
        self._deadline = 0.0
        """When the requests of the present call give up, on the monotonic clock."""

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_client", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._connect()

    def __repr__(self) -> str:
        return f"Registry({self.url!r})"

    @property
    def url(self) -> str:
        """Its URLs, without credentials."""
        return str(self._conf.get("url"))

    def writer_schemas(self, subject: str) -> list[WriterSchema]:
        """Return the versions of a subject, also deleted ones, whose records may exist still, ordered by id.

        Raises:
            RegistryUnavailable: the registry did not answer in time.
            OptionError: it refused the request, the subject does not exist, or a schema cannot be used.
        """
        with self._requests():
            return self._writer_schemas(subject)

    def schemas(self, subject: str, reader: int | Literal["latest"]) -> tuple[list[WriterSchema], str]:
        """Return the versions of a subject, and the schema of one of them or of the latest that is not deleted; waits
        and raises as :meth:`writer_schemas` does."""
        with self._requests():
            writers = self._writer_schemas(subject)
            found = self._version(subject, "latest") if reader == "latest" else self._known_version(subject, reader)
            return writers, found.text

    def _writer_schemas(self, subject: str) -> list[WriterSchema]:
        try:
            found = [self._known_version(subject, version) for version in self._listed(subject)]
        except OptionError as error:
            if getattr(error.__cause__, "http_status_code", None) != _MISSING:
                raise
            # A version was deleted permanently after it was listed.
            found = [self._known_version(subject, version) for version in self._listed(subject)]
        return sorted(found, key=lambda schema: schema.id)

    def _listed(self, subject: str) -> list[int]:
        versions = self._ask(f"subject {subject}", lambda: self._client.get_versions(subject, deleted=True))
        if len(versions) > VERSIONS_MAX:
            raise OptionError(
                f"subject {subject} of {self!r} has {len(versions)} versions; at most {VERSIONS_MAX} can be used. "
                "Delete those permanently whose records do not exist any more"
            )
        known, newest = self._versions.setdefault(subject, {}), max(versions, default=0)
        if newest in known and self._registered(subject, newest).schema_id != known[newest].id:
            known.clear()
        return versions

    def _known_version(self, subject: str, version: int) -> WriterSchema:
        """Return a version, which is requested once."""
        known = self._versions.setdefault(subject, {})
        if version not in known:
            known[version] = self._version(subject, version)
        return known[version]

    @contextmanager
    def _requests(self) -> Iterator[None]:
        """Let one thread at a time use the registry. Those that wait for it wait for the registry meanwhile."""
        deadline = time.monotonic() + self._wait_s
        with self._lock:
            self._deadline = deadline
            yield

    def _version(self, subject: str, version: int | Literal["latest"]) -> WriterSchema:
        found = self._registered(subject, version)
        used: dict[str, Any] = {}
        self._add_references(found, used)
        text = json.dumps(_with_definitions(_parsed(found), "", used, set()))
        return WriterSchema(_known(found.schema_id), _known(found.version), text)

    def _registered(self, subject: str, version: int | Literal["latest"]) -> "RegisteredSchema":
        self._client.clear_caches()  # it would return a version that was replaced
        found = self._ask(
            f"version {version} of subject {subject}",
            lambda: self._client.get_version(subject, version, deleted=version != "latest"),
        )
        if (kind := found.schema.schema_type or "AVRO") != "AVRO":
            raise OptionError(f"version {version} of subject {subject} of {self!r} is not Avro, but {kind}")
        return found

    def _add_references(self, schema: "RegisteredSchema", used: dict[str, Any]) -> None:
        """Add the definitions of the types that a schema may take from other subjects, by full name: each one there,
        also one inside another."""
        for reference in schema.schema.references or ():
            if (name := _known(reference.name)) in used:
                continue
            if len(used) == REFERENCES_MAX:
                raise OptionError(f"a schema of {self!r} uses more than {REFERENCES_MAX} others, among them {name}")
            found = self._registered(_known(reference.subject), _known(reference.version))
            used |= _named_types(_parsed(found)) | {name: _parsed(found)}
            self._add_references(found, used)

    def _ask(self, what: str, send: Callable[[], T]) -> T:
        """Return the answer to a request; an outage is reported once, when it begins."""
        from confluent_kafka.schema_registry import SchemaRegistryError

        is_reported = False
        while True:
            try:
                return send()
            except SchemaRegistryError as error:
                status = error.http_status_code
                if status < 500 and status not in _AGAIN:
                    reason = _REFUSED.get(status, "the request was refused")
                    raise OptionError(f"{what} of {self!r}: {reason} ({error})") from error
                failure = str(error)
            except Exception as error:  # noqa: BLE001  # those of the HTTP library that the client has chosen
                failure = f"{type(error).__name__}: {error}"
            if time.monotonic() >= self._deadline:
                raise RegistryUnavailable(
                    f"{self!r} did not answer within {self._wait_s:g} s ({failure}). Nothing of the batch was written. "
                    "Check the URL, and start the query with the same checkpoint when the registry answers",
                    url=self.url,
                    waited_ms=round(self._wait_s * 1000),
                )
            if not is_reported:
                log.warning("%r does not answer; the batch waits up to %g s: %s", self, self._wait_s, failure)
                is_reported = True
            threading.Event().wait(RETRY_S)


def avro(
    df: "DataFrame",
    column: str,
    registry: Registry,
    *,
    subject: str,
    reader: int | Literal["latest"] | Path = "latest",
    error: str = "error",
) -> "DataFrame":
    """Decode a binary column in Confluent's format: a zero byte, the schema's id in four bytes, the value in Avro.

    For a ``transform`` of a sink. The session needs the ``spark-avro`` jar of its Spark::

        registry = decode.Registry("https://registry:8081")

        def parse(df):
            rows = decode.avro(df, "value", registry, subject="orders-value")
            return rows.select("topic", "partition", "offset", "value.*", "error")

        sink = DeltaSink("/lake/orders", transform=parse, dead_letters=DeadLetters("/lake/bad", error="error"))

    Args:
        column: replaced by the decoded value, which has the type of the reader schema. It is null where the column is,
            and in a row that cannot be decoded.
        subject: the subject in which the records' producers register their schemas.
        reader: the schema that the values are converted to by Avro's rules for evolution: "latest" of the subject for
            each batch, one of its versions, or a file with a schema.
        error: the name of the column that says why a row cannot be decoded, otherwise null. It is added, unless another
            call has added it, for the key for example: then its reason stays. A row cannot be decoded if it is not in
            this format, its id is not one of the subject, or the reader schema cannot read it.

    Raises:
        RegistryUnavailable: the registry did not answer in time.
        OptionError: the subject or version does not exist, access was refused, a schema cannot be used, or the rows
            have a column ``error`` that is not text.
        SetupError: the session has no ``spark-avro`` jar.
    """
    from pyspark.sql import functions as F

    has_reasons = _has_reasons(df, error)
    if isinstance(reader, Path):
        writers, text = registry.writer_schemas(subject), reader.read_text("utf-8-sig")
    else:
        writers, text = registry.schemas(subject, reader)
    target = json.loads(text)
    is_record = isinstance(target, dict) and target.get("type") == "record"
    record = target if is_record else _wrapped(target)
    names = [field["name"] for field in record["fields"]]
    # Spark decodes a broken value as a record of nulls. In a value that was read, this field has its default.
    marker = {"name": _MARKER, "type": "boolean", "default": True}
    marked = json.dumps({**record, "fields": [marker, *record["fields"]]})
    branches = {
        schema.id: _decoded(column, schema.text if is_record else json.dumps(_wrapped(json.loads(schema.text))), marked)
        for schema in writers
    }
    rows = df.withColumn(_PREFIX, F.substring(column, 1, 5)).withColumn(_DECODED, _choice(branches))
    is_decoded = F.col(f"{_DECODED}.{_MARKER}").isNotNull()
    values = [F.col(_DECODED)[name].alias(name) for name in names]
    value = F.when(is_decoded, F.struct(*values) if is_record else values[0])
    schema_id = F.conv(F.hex(F.substring(column, 2, 4)), 16, 10)
    reason = (
        F.when(F.col(column).isNull() | is_decoded, F.lit(None).cast("string"))
        .when((F.length(_PREFIX) < 5) | (F.substring(_PREFIX, 1, 1) != F.lit(_MAGIC)), "no schema id")
        .when(
            F.col(_PREFIX).isin(*(F.lit(_prefix(id_)) for id_ in branches)),
            F.concat(F.lit("the reader schema cannot read the value with schema id "), schema_id),
        )
        .otherwise(F.concat(F.lit("schema id "), schema_id, F.lit(f" is not in subject {subject}")))
    )
    if has_reasons:  # of another column, decoded before
        reason = F.coalesce(F.col(_quoted(error)), reason)
    return rows.withColumns({column: value, error: reason}).drop(_PREFIX, _DECODED)


def _quoted(name: str) -> str:
    """Return the name of a column as it is written in SQL: a dot in it is no access to a field."""
    return "`" + name.replace("`", "``") + "`"


def _has_reasons(df: "DataFrame", error: str) -> bool:
    """Whether an earlier decoder has added the column for reasons.

    Raises:
        OptionError: a column of this name has another type, so it is the user's.
    """
    from pyspark.sql import types as T

    found = [field for field in df.schema if field.name.lower() == error.lower()]
    if found and df.sparkSession.conf.get("spark.sql.caseSensitive") == "true":
        found = [field for field in found if field.name == error]
    if found and not isinstance(kind := found[0].dataType, T.StringType | T.NullType):
        raise OptionError(
            f"the rows have a column {error} already, {kind.simpleString()}: rename it, or name another column for the "
            "reason why a record cannot be decoded, such as error='decode_error'"
        )
    return bool(found)


def debezium(
    df: "DataFrame",
    column: str,
    schema: str | None = None,
    *,
    sequence: str | None = None,
    error: str = "error",
) -> "DataFrame":
    """Decode changes in Debezium's format, for a sink that merges them by key. Tombstones are left out.

    For a ``transform`` of a sink::

        def parse(df):
            changes = decode.debezium(df, "value", "id BIGINT, name STRING", sequence="try_cast(source.lsn AS BIGINT)")
            return changes.select("value.*", "op", "sequence", "topic", "partition", "offset", "error")

        merge = Merge(
            ["id"], delete_when="op = 'd'", sequence_by="sequence", deleted="/lake/deleted_customers", without=["op"]
        )
        letters = DeadLetters("/lake/bad", error="error")
        sink = DeltaSink("/lake/customers", transform=parse, merge=merge, dead_letters=letters)

    Args:
        column: the change, in JSON with or without its schema, or as :func:`avro` decodes it. It is replaced by the row
            after the change, or before it if it is a deletion; null in a row that cannot be decoded.
        schema: the columns of a row and their types, as in ``CREATE TABLE``. For JSON only.
        sequence: the SQL expression that orders the changes of a key, with the column ``source`` of the change: a map
            of text in JSON, a record in Avro. Its value is added as column ``sequence``. Use ``try_cast``: a ``CAST``
            ends the query at a value of another type.
        error: the name of the column that says why a change cannot be decoded, otherwise null. It is added, unless
            :func:`avro` has added it. A change cannot be decoded if it is not in this format, its operation is not one
            of a row (``c``, ``u``, ``r``, ``d``), a value does not have its type, the database did not log a value
            (:data:`UNAVAILABLE`), or its ``sequence`` is null.

    The column ``op`` is added too: Debezium's operation.

    Raises:
        OptionError: the column's type and ``schema`` do not fit, or the rows have one of these columns already, or a
            column ``error`` that is not text.
    """
    from pyspark.sql import functions as F
    from pyspark.sql import types as T

    is_json = not isinstance(df.schema[column].dataType, T.StructType)
    if is_json != (schema is not None):
        raise OptionError(
            f"column {column} is {df.schema[column].dataType.simpleString()}: changes in JSON need a schema of their "
            "rows, and those that decode.avro decoded have one already"
        )
    if taken := {"op", "source", "sequence"} & set(df.columns):
        raise OptionError(f"the rows have a column {min(taken)} already; rename it before decode.debezium")
    rows = df if _has_reasons(df, error) else df.withColumn(error, F.lit(None).cast("string"))
    rows = rows.where(F.col(column).isNotNull() | F.col(_quoted(error)).isNotNull())
    if is_json:
        part = f"before STRUCT<{schema}>, after STRUCT<{schema}>, op STRING, source MAP<STRING, STRING>"
        whole = f"{part}, payload STRUCT<{part}>, {_MARKER} STRING"
        text = F.col(column).cast("string")
        rows = rows.withColumn(_DECODED, F.from_json(text, whole, {"columnNameOfCorruptRecord": _MARKER}))
        bare = F.struct(*(F.col(f"{_DECODED}.{name}") for name in ("before", "after", "op", "source")))
        rows = rows.withColumn(_ENVELOPE, F.coalesce(f"{_DECODED}.payload", bare))
        is_broken = F.col(f"{_DECODED}.{_MARKER}").isNotNull()
    else:
        rows, is_broken = rows.withColumn(_ENVELOPE, F.col(column)), F.lit(False)
    op = F.col("op")
    row = F.when(op == "d", F.col(f"{_ENVELOPE}.before")).when(op.isin(*_CHANGES), F.col(f"{_ENVELOPE}.after"))
    rows = rows.select("*", f"{_ENVELOPE}.op", f"{_ENVELOPE}.source").withColumn(_ROW, row)
    reason = (
        F.when(F.col(_quoted(error)).isNotNull(), F.col(_quoted(error)))
        .when(is_broken, "not a change in Debezium's format, or a value of another type than in the schema")
        .when(op.isNull(), "the change has no operation")
        .when(~op.isin("d", *_CHANGES), F.concat(F.lit("operation "), op, F.lit(" is not a change of a row")))
        .when(F.col(_ROW).isNull(), F.concat(F.lit("the row is missing in operation "), op))
    )
    for field in rows.schema[_ROW].dataType.fields:  # type: ignore[attr-defined]
        value, kind = F.col(_ROW)[field.name], field.dataType
        if isinstance(kind, T.MapType):
            value = F.map_keys(value)
        if isinstance(kind, T.ArrayType | T.MapType):
            value = F.concat_ws(",", value.cast("array<string>"))
        if isinstance(kind, T.StringType | T.BinaryType | T.ArrayType | T.MapType):
            is_unavailable = value.cast("string").isin(*_UNAVAILABLE_ALL) & (op != "d")
            remedy = "was not logged by the database; set REPLICA IDENTITY FULL for its table"
            reason = reason.when(is_unavailable, f"column {field.name} {remedy}")
    if sequence is not None:
        rows = rows.withColumn("sequence", F.expr(sequence))
        reason = reason.when(F.col("sequence").isNull(), "the sequence is null")
    rows = rows.withColumn(error, reason)
    rows = rows.withColumn(column, F.when(F.col(_quoted(error)).isNull(), F.col(_ROW)))
    return rows.drop(_ENVELOPE, _ROW, _DECODED, "source")


def _without_credentials(conf: Mapping[str, Any]) -> dict[str, Any]:
    """Move credentials from the URLs to their setting: the library of the client logs each URL that it requests.

    Raises:
        OptionError: the URLs have several credentials, or their end is not clear.
    """
    urls = [urlsplit(url.strip()) for url in str(conf.get("url", "")).split(",")]
    if any("@" in url.path for url in urls):
        raise OptionError("a URL of the registry has an @ behind its host. Write / in a password as %2F, and @ as %40")
    found = {unquote(url.netloc.rpartition("@")[0]) for url in urls if "@" in url.netloc}
    own = conf.get("basic.auth.user.info")
    if len(found | ({own} if own and found else set())) > 1:
        raise OptionError(
            "the URLs of the registry have other credentials than basic.auth.user.info, or than each other"
        )
    if not found:
        return dict(conf)
    bare = ",".join(url._replace(netloc=url.netloc.rpartition("@")[2]).geturl() for url in urls)
    return {**conf, "url": bare, "basic.auth.user.info": found.pop()}


def _new_client(conf: dict[str, Any]) -> "SchemaRegistryClient":
    try:
        from confluent_kafka.schema_registry import SchemaRegistryClient
    except ImportError as error:
        raise SetupError(
            f"the client of a schema registry needs more packages on the driver's host ({error}): "
            "`pip install 'confluent-kafka[schemaregistry]'`"
        ) from error
    try:
        return SchemaRegistryClient(conf)
    except (ValueError, TypeError, OSError) as error:
        # The client's own text may have a URL with a password, and so may the traceback.
        url = str(conf.get("url"))
        reason = str(error).replace(url, "(url)")
        raise OptionError(f"the settings of the schema registry are wrong: {reason}") from None


def _known(value: T | None) -> T:
    """Return a part of a registry's answer."""
    if value is None:
        raise OptionError("the answer of the schema registry has no id, version, name or schema; check its URL")
    return value


def _parsed(registered: "RegisteredSchema") -> Any:
    """Return a schema as JSON; a primitive one may be a bare name."""
    text = _known(registered.schema.schema_str)
    return text if text in _PRIMITIVE else json.loads(text)


def _named_types(node: Any, namespace: str = "") -> dict[str, Any]:
    """Return the definitions of the named types in a part of a schema, by full name."""
    if isinstance(node, list):
        return {name: found for part in node for name, found in _named_types(part, namespace).items()}
    if not isinstance(node, dict):
        return {}
    kind = node["type"]
    if not isinstance(kind, str) or kind not in _NAMED:
        parts = [node.get("items"), node.get("values"), *([] if isinstance(kind, str) else [kind])]
        return _named_types(parts, namespace)
    full, own = _full_name(node, namespace)
    inner = [field["type"] for field in node.get("fields", ())]
    return {full: {**node, "namespace": own}} | _named_types(inner, own)


def _full_name(node: Mapping[str, Any], namespace: str) -> tuple[str, str]:
    """Return the full name of a named type, and its namespace."""
    before, _, name = node["name"].rpartition(".")
    own = before or node.get("namespace", namespace)
    return f"{own}.{name}" if own else name, own


def _with_definitions(node: Any, namespace: str, used: Mapping[str, Any], defined: set[str]) -> Any:
    """Return a part of a schema, in which the first use of a type of another schema is its definition.

    Args:
        namespace: of the enclosing type.
        used: the schemas of these types by their full names.
        defined: the full names of the types that are defined before this part; changed.
    """

    def inside(part: Any, of: str = namespace) -> Any:
        return _with_definitions(part, of, used, defined)

    if isinstance(node, str):
        names = [node] if "." in node or not namespace else [f"{namespace}.{node}", node]
        found = next((name for name in names if name in used), None)
        if node in _PRIMITIVE or found is None or defined.intersection(names):
            return node
        return inside(used[found], "")
    if isinstance(node, list):
        return [inside(part) for part in node]
    kind = node["type"]
    if (
        not isinstance(kind, str) or kind not in _NAMED
    ):  # an array, a map, a type with properties or a nested definition
        changed = {key: inside(node[key]) for key in ("items", "values") if key in node}
        return {**node, **changed} if changed else {**node, "type": inside(kind)}
    full, own = _full_name(node, namespace)
    if full in defined:  # its first use was before that of the type around it
        return full
    defined.add(full)
    fields = {"fields": [{**f, "type": inside(f["type"], own)} for f in node["fields"]]} if "fields" in node else {}
    return {**node, "name": full.rpartition(".")[2], "namespace": own, **fields}


def _wrapped(schema: Any) -> dict[str, Any]:
    """Return the record whose only field has this type. Its values have the same bytes."""
    return {"type": "record", "name": "__Wrapped", "fields": [{"name": "value", "type": schema}]}


def _decoded(column: str, writer: str, reader: str) -> "Column":
    from pyspark.sql import functions as F
    from pyspark.sql.avro.functions import from_avro

    value = F.substring(column, len(_MAGIC) + 5, _ALL)
    try:
        return from_avro(value, writer, {"avroSchema": reader, "mode": "PERMISSIVE"})
    except TypeError as error:  # Spark's class is not there
        raise SetupError(
            "the Spark session has no spark-avro. Add the jar of its Spark version, for example "
            f"--packages {compatibility.avro_coordinate()}"
        ) from error


def _choice(branches: "Mapping[int, Column]") -> "Column":
    """Return the branch of a row's schema id, found by bisection; null if it has none."""
    from pyspark.sql import functions as F

    ids = sorted(branches)
    if len(ids) == 1:
        return F.when(F.col(_PREFIX) == F.lit(_prefix(ids[0])), branches[ids[0]])
    middle = len(ids) // 2
    lower, upper = ({id_: branches[id_] for id_ in part} for part in (ids[:middle], ids[middle:]))
    return F.when(F.col(_PREFIX) < F.lit(_prefix(ids[middle])), _choice(lower)).otherwise(_choice(upper))


def _prefix(schema_id: int) -> bytes:
    return _MAGIC + struct.pack(">I", schema_id)
