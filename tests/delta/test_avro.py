"""``decode.avro`` on a real Spark, with records of the official serializer, and a registry on loopback that the
official client drives."""

import importlib
import json
import logging
import pickle
import re
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from fastavro import parse_schema
from google.protobuf import descriptor_pb2
from kit.schema_registry import SchemaRegistry
from sink_helpers import Query, rows, values_from
from sink_source import offset

from spark_group_source import DeadLetters, OptionError, RegistryUnavailable, decode
from spark_group_source.delta import dead_letters

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("few_tasks")]

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA_OF_RECIPE = "topic string, partition int, offset long, value binary"
AS_PROTOC = """from google.protobuf import descriptor_pool
from google.protobuf.internal import builder
DESCRIPTOR = descriptor_pool.Default().AddSerializedFile({!r})
builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())
builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, "shop_pb2", globals())
"""
"""What ``protoc --python_out`` writes, with the serialized descriptor."""
SUBJECT = "orders-value"
ID = {"name": "id", "type": "long"}
AMOUNT = {"name": "amount", "type": "int"}
NOTE = {"name": "note", "type": ["null", "string"], "default": None}


def record(*fields: dict[str, Any], name: str = "Order", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "namespace": "shop", "fields": list(fields), **more}


FIRST = record(ID, AMOUNT)
SECOND = record(ID, {**AMOUNT, "type": "long"}, NOTE)


@pytest.fixture
def server() -> Iterator[SchemaRegistry]:
    with SchemaRegistry() as server:
        yield server


Serialize = Callable[..., bytes]


@pytest.fixture
def serialize(server: SchemaRegistry) -> Serialize:
    """``serialize(schema, value)``: the bytes of the official serializer, which registers the schema."""
    client = SchemaRegistryClient({"url": server.url})

    def build(schema: Any, value: Any, references: Sequence[SchemaReference] = ()) -> bytes:
        text = Schema(json.dumps(schema), "AVRO", list(references))
        serializer = AvroSerializer(client, text, conf={"auto.register.schemas": True})
        context = SerializationContext("orders", MessageField.VALUE)
        return serializer(value, context)  # type: ignore[no-any-return]

    return build


@pytest.fixture
def registry(server: SchemaRegistry) -> decode.Registry:
    return decode.Registry(server.url)


def frame(spark: "SparkSession", values: Sequence[bytes | None]) -> "DataFrame":
    return spark.createDataFrame([(n, value) for n, value in enumerate(values)], "n int, value binary")


def decoded(df: "DataFrame", registry: decode.Registry, **more: Any) -> list[tuple[Any, Any]]:
    """The values and errors, in order."""
    found = decode.avro(df, "value", registry, **{"subject": SUBJECT, **more}).orderBy("n").collect()
    return [(row["value"].asDict() if hasattr(row["value"], "asDict") else row["value"], row["error"]) for row in found]


def test_records_of_all_versions_are_read_with_the_latest_schema(
    spark: "SparkSession", serialize: Serialize, registry: decode.Registry
) -> None:
    values = [serialize(FIRST, {"id": 1, "amount": 5}), serialize(SECOND, {"id": 2, "amount": 6, "note": "x"}), None]
    assert decoded(frame(spark, values), registry) == [
        ({"id": 1, "amount": 5, "note": None}, None),
        ({"id": 2, "amount": 6, "note": "x"}, None),
        (None, None),
    ]
    schema = decode.avro(frame(spark, values), "value", registry, subject=SUBJECT).schema
    assert schema.simpleString() == "struct<n:int,value:struct<id:bigint,amount:bigint,note:string>,error:string>"


def test_a_record_that_cannot_be_decoded_has_no_value_and_the_reason(
    spark: "SparkSession", serialize: Serialize, registry: decode.Registry
) -> None:
    good = serialize(FIRST, {"id": 1, "amount": 5})
    values = [b"", b"\0\0\0\0", b"\1" + good[1:], b'{"id": 1}', b"\0\0\0\0\x63" + good[5:], good[:-1], good]
    unknown, broken = (
        "schema id 99 is not in subject orders-value",
        "the reader schema cannot read the value with schema id 1",
    )
    reasons = [*["no schema id"] * 4, unknown, broken]
    assert decoded(frame(spark, values), registry) == [
        *((None, reason) for reason in reasons),
        ({"id": 1, "amount": 5}, None),
    ]


@pytest.mark.parametrize("kind", ["string", "bytes", {"type": "array", "items": "long"}])
def test_a_record_that_claims_two_billion_bytes_cannot_be_decoded(
    spark: "SparkSession", serialize: Serialize, registry: decode.Registry, kind: Any
) -> None:
    """Avro allocates a length before it reads what has it; without its limits that ends the JVM."""
    empty: dict[str, Any] = {"string": "", "bytes": b""}
    good = serialize(record({"name": "content", "type": kind}), {"content": empty.get(str(kind), [])})
    two_billion = bytes([0x80, 0xD0, 0xAC, 0xF3, 0x0E])
    found = decoded(frame(spark, [good[:5] + two_billion + b"x" * 10]), registry)
    assert found == [(None, "the reader schema cannot read the value with schema id 1")]


def test_the_reason_of_a_column_decoded_before_stays(
    spark: "SparkSession", serialize: Serialize, registry: decode.Registry
) -> None:
    good = serialize(FIRST, {"id": 1, "amount": 5})
    rows = frame(spark, [good, b"", good]).selectExpr("*", "IF(n < 1, X'', IF(n < 2, X'01', value)) AS key")
    for column in ("key", "value"):
        rows = decode.avro(rows, column, registry, subject=SUBJECT)
    assert [row[0] for row in rows.orderBy("n").select("error").collect()] == [
        "no schema id",
        "no schema id",
        None,
    ]


def test_a_record_of_nulls_is_no_broken_record(
    spark: "SparkSession", serialize: Serialize, registry: decode.Registry
) -> None:
    assert decoded(frame(spark, [serialize(record(NOTE), {"note": None})]), registry) == [({"note": None}, None)]


def test_each_of_many_versions_is_found(spark: "SparkSession", serialize: Serialize, registry: decode.Registry) -> None:
    """Bisection: numbers of versions around powers of two."""
    values: list[bytes | None] = []
    for n in range(9):
        values.append(serialize(record(ID, AMOUNT, doc=f"version {n}"), {"id": n, "amount": -n}))
        expected = [({"id": m, "amount": -m}, None) for m in range(n + 1)]
        assert decoded(frame(spark, values), registry) == expected


def test_the_reader_may_be_a_version_or_a_file(
    spark: "SparkSession", serialize: Serialize, registry: decode.Registry, tmp_path: Path
) -> None:
    df = frame(
        spark, [serialize(FIRST, {"id": 1, "amount": 5}), serialize(SECOND, {"id": 2, "amount": 6, "note": "x"})]
    )
    of_file = tmp_path / "order.avsc"
    of_file.write_text(json.dumps(record(ID)))
    assert decoded(df, registry, reader=of_file) == [({"id": 1}, None), ({"id": 2}, None)]
    narrow = "the reader schema cannot read the value with schema id 2"
    assert decoded(df, registry, reader=1) == [({"id": 1, "amount": 5}, None), (None, narrow)]
    with pytest.raises(OptionError, match=r"version 7 of subject orders-value of Registry\(.*\): it does not exist"):
        decoded(df, registry, reader=7)


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "string"}, "text", "text"),
        ({"type": "array", "items": "long"}, [1, 2], [1, 2]),
        (["null", FIRST], {"id": 1, "amount": 2}, (1, 2)),
    ],
)
def test_a_value_need_not_be_a_record(
    spark: "SparkSession", serialize: Serialize, registry: decode.Registry, schema: Any, value: Any, expected: Any
) -> None:
    df = frame(spark, [serialize(schema, value), b"\0\0\0\0\1"])
    (good, error), broken = decoded(df, registry)
    assert (tuple(good.values()) if isinstance(good, dict) else good, error) == (expected, None)
    assert broken == (None, "the reader schema cannot read the value with schema id 1")


def test_logical_types_have_sparks_types(
    spark: "SparkSession", serialize: Serialize, registry: decode.Registry
) -> None:
    schema = record(
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
    )
    at = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    df = frame(spark, [serialize(schema, {"at": at, "price": Decimal("12.34"), "kind": "B"})])
    ((value, error),) = decoded(df, registry)
    assert error is None and (value["at"].astimezone(UTC), value["price"], value["kind"]) == (at, Decimal("12.34"), "B")


def test_a_schema_may_use_types_of_other_subjects(
    spark: "SparkSession", server: SchemaRegistry, serialize: Serialize, registry: decode.Registry
) -> None:
    """Directly and through another one, more than once, by full and by short names."""
    client = SchemaRegistryClient({"url": server.url})
    country = record({"name": "code", "type": "string"}, name="Country")
    address = record({"name": "city", "type": "string"}, {"name": "country", "type": "Country"}, name="Address")
    client.register_schema("country", Schema(json.dumps(country), "AVRO"))
    to_country = SchemaReference("shop.Country", "country", 1)
    client.register_schema("address", Schema(json.dumps(address), "AVRO", [to_country]))
    order = record(
        ID,
        {"name": "to", "type": "Address"},
        {"name": "bill", "type": ["null", "shop.Address"]},
        {"name": "all", "type": {"type": "array", "items": "Address"}},
    )
    home = {"city": "Bonn", "country": {"code": "DE"}}
    value = {"id": 1, "to": home, "bill": home, "all": [home]}
    bytes_ = serialize(order, value, [SchemaReference("shop.Address", "address", 1)])
    ((found, error),) = decoded(frame(spark, [bytes_]), registry)
    assert error is None and found["id"] == 1
    assert [place.asDict(recursive=True) for place in (found["to"], found["bill"], *found["all"])] == [home] * 3


def test_a_schema_may_use_a_type_inside_one_of_another_subject(
    server: SchemaRegistry, registry: decode.Registry
) -> None:
    """Before the type around it, after it, or alone."""
    client = SchemaRegistryClient({"url": server.url})
    status = {"type": "enum", "name": "Status", "symbols": ["A", "B"]}
    states = {"type": "array", "items": ["null", status]}
    customer = record({"name": "all", "type": states}, {"name": "now", "type": "Status"}, name="Customer")
    client.register_schema("customer", Schema(json.dumps(customer), "AVRO"))
    to_customer = SchemaReference("shop.Customer", "customer", 1)
    for at, names in enumerate((["Status"], ["Status", "Customer"], ["Customer", "shop.Status"])):
        order = record(*({"name": f"f{n}", "type": name} for n, name in enumerate(names)))
        client.register_schema(subject := f"order{at}", Schema(json.dumps(order), "AVRO", [to_customer]))
        (schema,) = registry.writer_schemas(subject)
        parse_schema(json.loads(schema.text))


def test_a_short_name_may_be_that_of_a_type_without_a_namespace(
    spark: "SparkSession", server: SchemaRegistry, registry: decode.Registry
) -> None:
    """As Java's parser reads it; that of the official serializer for Python does not."""
    client = SchemaRegistryClient({"url": server.url})
    client.register_schema("kind", Schema('{"type": "enum", "name": "Kind", "symbols": ["A", "B"]}', "AVRO"))
    order = json.dumps(record({"name": "kind", "type": "Kind"}, {"name": "other", "type": "Kind"}))
    reference = SchemaReference("Kind", "kind", 1)
    schema_id = client.register_schema(SUBJECT, Schema(order, "AVRO", [reference]))
    value = struct.pack(">bI", 0, schema_id) + bytes([2, 0])
    assert decoded(frame(spark, [value]), registry) == [({"kind": "B", "other": "A"}, None)]


def test_a_type_may_be_nested_in_another_one_without_a_name(registry: decode.Registry, serialize: Serialize) -> None:
    nested = record({"name": "ids", "type": {"type": {"type": "array", "items": "long"}}})
    client = SchemaRegistryClient({"url": registry.url})
    client.register_schema(SUBJECT, Schema(json.dumps(nested), "AVRO"))
    (schema,) = registry.writer_schemas(SUBJECT)
    assert json.loads(schema.text)["fields"] == nested["fields"]


def test_a_version_is_read_from_the_registry_once_and_their_list_for_each_batch(
    spark: "SparkSession", server: SchemaRegistry, serialize: Serialize, registry: decode.Registry
) -> None:
    values = [serialize(FIRST, {"id": 1, "amount": 5})]
    for _ in range(2):
        decoded(frame(spark, values), registry, reader=1)
    values.append(serialize(SECOND, {"id": 2, "amount": 6, "note": "x"}))
    server.requests.clear()
    assert decoded(frame(spark, values), registry)[1] == ({"id": 2, "amount": 6, "note": "x"}, None)
    asked = [request.partition("?")[0].partition("versions")[2] for request in server.requests]
    assert sorted(asked) == ["", "/2", "/latest"]


def test_records_of_a_deleted_version_are_read(
    spark: "SparkSession", server: SchemaRegistry, serialize: Serialize, registry: decode.Registry
) -> None:
    values = [serialize(FIRST, {"id": 1, "amount": 5}), serialize(SECOND, {"id": 2, "amount": 6, "note": "x"})]
    SchemaRegistryClient({"url": server.url}).delete_version(SUBJECT, 1)
    assert [error for _, error in decoded(frame(spark, values), registry)] == [None, None]


# --- the registry -----------------------------------------------------------------------------------------------------


def test_an_outage_is_waited_for_and_reported_once(
    spark: "SparkSession",
    server: SchemaRegistry,
    serialize: Serialize,
    registry: decode.Registry,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode, "RETRY_S", 0.01)
    df = frame(spark, [serialize(FIRST, {"id": 1, "amount": 5})])
    found: list[Any] = []
    with server.down() as refused:
        thread = threading.Thread(target=lambda: found.extend(decoded(df, registry)))
        thread.start()
        assert refused.wait(600)
        seen = len(server.requests)
        while len(server.requests) < seen + 3 and thread.is_alive():
            refused.wait(0.01)
    thread.join()
    assert found == [({"id": 1, "amount": 5}, None)]
    (line,) = [r.getMessage() for r in caplog.records if r.name == decode.__name__ and r.levelno >= logging.WARNING]
    assert line.startswith(
        f"Registry('{server.url}') does not answer; the batch waits up to 120 s: down (HTTP status code 503"
    )


def test_a_version_that_is_deleted_permanently_while_the_others_are_read_is_left_out(
    server: SchemaRegistry, registry: decode.Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, versions = SchemaRegistryClient({"url": server.url}), server._versions
    for schema in (FIRST, SECOND):
        client.register_schema(SUBJECT, Schema(json.dumps(schema), "AVRO"))

    def listed(subject: str, with_deleted: bool) -> list[int]:
        found = versions(subject, with_deleted)
        if len(found) > 1:
            server.delete_permanently(subject, 1)
        return found

    monkeypatch.setattr(server, "_versions", listed)
    assert [schema.version for schema in registry.writer_schemas(SUBJECT)] == [2]
    with pytest.raises(OptionError, match=r"version 1 of subject orders-value of .*: it does not exist"):
        registry.schemas(SUBJECT, 1)


def test_a_pinned_reader_is_read_once(server: SchemaRegistry, registry: decode.Registry) -> None:
    for schema in (FIRST, SECOND):
        SchemaRegistryClient({"url": server.url}).register_schema(SUBJECT, Schema(json.dumps(schema), "AVRO"))
    for _ in range(3):
        (writer, _), text = registry.schemas(SUBJECT, 1)
        assert writer.text == text
    assert sum("versions/1" in request for request in server.requests) == 1


@pytest.mark.parametrize("left", [0, 1], ids=["subject", "newest version"])
def test_a_schema_that_has_the_number_of_a_deleted_one_is_read(
    server: SchemaRegistry, registry: decode.Registry, left: int
) -> None:
    """A registry numbers the next version after those that are left."""

    def register(*schemas: Any) -> None:
        client = SchemaRegistryClient({"url": server.url})
        for schema in schemas:
            client.register_schema(SUBJECT, Schema(json.dumps(schema), "AVRO"))

    register(FIRST, SECOND)
    assert [schema.id for schema in registry.writer_schemas(SUBJECT)] == [1, 2]
    server.delete_permanently(SUBJECT, *range(left + 1, 3))
    third = record(ID, {"name": "third", "type": "long"})
    register(*[FIRST, third][left:])
    writers, latest = registry.schemas(SUBJECT, "latest")
    assert [(schema.version, schema.id) for schema in writers] == [(1, 1), (2, 3)]
    assert json.loads(latest) == third
    assert registry.schemas(SUBJECT, 2)[1] == latest


def test_a_batch_waits_once_for_all_its_requests(server: SchemaRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second outage ends it, although it is a short one."""
    SchemaRegistryClient({"url": server.url}).register_schema(SUBJECT, Schema(json.dumps(FIRST), "AVRO"))
    now = [1000.0]
    monkeypatch.setattr(decode, "RETRY_S", 0.01)
    monkeypatch.setattr(decode, "time", SimpleNamespace(monotonic=lambda: now[0]))
    registry = decode.Registry(server.url, wait_s=3)
    answer = server._answer

    def slow(method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        now[0] += 2
        server.is_down.set() if "latest" in path else server.is_down.clear()
        return answer(method, path, headers, body)

    monkeypatch.setattr(server, "_answer", slow)
    with pytest.raises(RegistryUnavailable, match="within 3 s"):
        registry.schemas(SUBJECT, "latest")
    assert sum("latest" in request for request in server.requests) == 1


def test_a_registry_that_stays_away_ends_the_batch(server: SchemaRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "RETRY_S", 0.01)
    registry = decode.Registry(server.url, wait_s=0.05)
    server.stop()
    with pytest.raises(RegistryUnavailable, match=r"did not answer within 0\.05 s \(ConnectError: .*refused") as raised:
        registry.writer_schemas(SUBJECT)
    assert raised.value.fields == {"url": server.url, "waited_ms": 50}


@pytest.mark.parametrize("auth", ["basic", "bearer"])
def test_credentials_are_sent_and_never_shown(auth: str) -> None:
    kind = {"user": "ann:secret"} if auth == "basic" else {"token": "secret"}
    with SchemaRegistry(**kind) as server:
        conf = {"url": server.url, "basic.auth.user.info": "ann:secret"}
        if auth == "bearer":
            names = {"token": "secret", "logical.cluster": "c", "identity.pool.id": "p"}
            credentials = {f"bearer.auth.{name}": text for name, text in names.items()}
            conf = {"url": server.url, "bearer.auth.credentials.source": "STATIC_TOKEN", **credentials}
        with pytest.raises(OptionError, match=r"subject orders-value of Registry\(.*\): it does not exist"):
            decode.Registry(conf).writer_schemas(SUBJECT)
        with pytest.raises(OptionError, match="the credentials were refused"):
            decode.Registry(server.url).writer_schemas(SUBJECT)
        assert "secret" not in repr(decode.Registry(conf))


def test_a_password_in_the_url_is_not_shown() -> None:
    registry = decode.Registry("http://ann:secret@127.0.0.1:1/x, http://127.0.0.1:2", wait_s=0)
    assert registry.url == "http://127.0.0.1:1/x,http://127.0.0.1:2"
    with pytest.raises(RegistryUnavailable) as raised:
        registry.writer_schemas(SUBJECT)
    assert "secret" not in str(raised.value)
    with pytest.raises(OptionError, match=r"wrong: Invalid url \(url\)"):
        decode.Registry("ftp://ann:secret@host")
    for conf in ("http://ann:se/cret@host", "http://ann:a@one,http://ann:b@two"):
        with pytest.raises(OptionError) as refused:
            decode.Registry(conf)
        assert "ann" not in str(refused.value)


def test_a_password_in_the_url_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The HTTP library of the client logs each URL."""
    caplog.set_level("INFO")
    server = SchemaRegistry(user="ann:se:cret/1")
    try:
        registry = decode.Registry(server.url.replace("//", "//ann:se%3Acret%2F1@"), wait_s=0)
        with pytest.raises(OptionError, match="subject"):
            registry.writer_schemas("no-such-subject")
        assert server.requests and "cret" not in caplog.text
    finally:
        server.stop()


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(OptionError, match=r"settings of the schema registry are wrong: .*no\.such\.setting"):
        decode.Registry({"url": "http://127.0.0.1:1", "no.such.setting": "x"})
    with pytest.raises(OptionError, match=r"settings of the schema registry are wrong: .*No such file"):
        decode.Registry({"url": "https://127.0.0.1:1", "ssl.ca.location": "/no/such/file"})
    with pytest.raises(OptionError, match="wait_s is -1; it must be 0 or more"):
        decode.Registry("http://127.0.0.1:1", wait_s=-1)


def test_other_kinds_of_schemas_and_too_many_are_refused(
    server: SchemaRegistry, serialize: Serialize, registry: decode.Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = SchemaRegistryClient({"url": server.url})
    client.register_schema("json-value", Schema("{}", "JSON"))
    with pytest.raises(OptionError, match=r"version 1 of subject json-value of .* is not Avro, but JSON"):
        registry.writer_schemas("json-value")
    monkeypatch.setattr(decode, "VERSIONS_MAX", 1)
    for schema in (FIRST, SECOND):
        client.register_schema(SUBJECT, Schema(json.dumps(schema), "AVRO"))
    with pytest.raises(OptionError, match="has 2 versions; at most 1 can be used"):
        registry.writer_schemas(SUBJECT)
    monkeypatch.setattr(decode, "REFERENCES_MAX", 0)
    reference = SchemaReference("shop.Order", SUBJECT, 1)
    client.register_schema(
        "cart-value", Schema(json.dumps(record({"name": "o", "type": "Order"}, name="Cart")), "AVRO", [reference])
    )
    with pytest.raises(OptionError, match=r"uses more than 0 others, among them shop\.Order"):
        registry.writer_schemas("cart-value")


def test_a_registry_is_pickled_without_its_connection(serialize: Serialize, registry: decode.Registry) -> None:
    """As Spark Connect does with a sink's transform."""
    serialize(FIRST, {"id": 1, "amount": 5})
    copy = pickle.loads(pickle.dumps(registry))
    assert copy.writer_schemas(SUBJECT) == registry.writer_schemas(SUBJECT)


# --- with a sink ----------------------------------------------------------------------------------------------------


def parsed(
    values: Sequence[bytes | None], registry: decode.Registry, *fields: str
) -> "Callable[[DataFrame], DataFrame]":
    def parse(df: "DataFrame") -> "DataFrame":
        found = decode.avro(values_from(values)(df), "value", registry, subject=SUBJECT)
        return found.select("topic", "partition", "offset", *(f"value.{name}" for name in fields), "error")

    return parse


@pytest.mark.parametrize("writer", ["auto", pytest.param("options", marks=pytest.mark.full)])
def test_G4_records_of_a_new_schema_get_its_columns_and_broken_ones_are_dead_letters(
    query: Query, tmp_path: Path, serialize: Serialize, registry: decode.Registry
) -> None:
    table, bad = tmp_path / "orders", tmp_path / "bad"
    values: list[bytes | None] = [serialize(FIRST, {"id": 10, "amount": 5}), b"broken"]
    letters = DeadLetters(bad, error="error", max_fraction=1)
    sink = query.sink(table, transform=parsed(values, registry, "*"), dead_letters=letters, merge_schema=True)
    query.run(sink, 0, offset(0, {("orders", 0): (0, 2)}))
    wide = record(ID, AMOUNT, NOTE)
    values += [serialize(wide, {"id": 12, "amount": 7, "note": "x"}), b"\0\0\0\0\x63rest"]
    query.run(sink, 1, offset(1, {("orders", 0): (2, 4)}))
    assert rows(table) == [("orders", 0, 0, 10, 5, None), ("orders", 0, 2, 12, 7, "x")]
    at = list(dead_letters.COLUMNS).index
    assert [(row[2], row[at("error_class")], row[at("error")]) for row in rows(bad)] == [
        (1, "TRANSFORM", "error: no schema id"),
        (3, "TRANSFORM", "error: schema id 99 is not in subject orders-value"),
    ]


@pytest.mark.parametrize("is_wider", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_wider_type_changes_the_table_or_its_values_that_do_not_fit_are_dead_letters(
    query: Query, spark: "SparkSession", tmp_path: Path, serialize: Serialize, registry: decode.Registry, is_wider: bool
) -> None:
    table, bad = tmp_path / "orders", tmp_path / "bad"
    values: list[bytes | None] = [serialize(FIRST, {"id": 10, "amount": 5})]
    letters = DeadLetters(bad, error="error", max_fraction=1)
    sink = query.sink(
        table, transform=parsed(values, registry, "id", "amount"), dead_letters=letters, merge_schema=is_wider
    )
    query.run(sink, 0, offset(0, {("orders", 0): (0, 1)}))
    if is_wider:
        spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('delta.enableTypeWidening'='true')")
    values += [serialize(SECOND, {"id": 11, "amount": amount, "note": "x"}) for amount in (7, 7_000_000_000)]
    query.run(sink, 1, offset(1, {("orders", 0): (1, 3)}))
    small = [("orders", 0, 0, 10, 5), ("orders", 0, 1, 11, 7)]
    assert rows(table) == small + [("orders", 0, 2, 11, 7_000_000_000)] * is_wider
    assert [row[2] for row in rows(bad)] == [2] * (not is_wider)


def test_G4_records_are_replayed_when_their_schema_belongs_to_the_subject(
    query: Query, spark: "SparkSession", server: SchemaRegistry, tmp_path: Path, registry: decode.Registry
) -> None:
    client = SchemaRegistryClient({"url": server.url})
    client.register_schema(SUBJECT, Schema(json.dumps(FIRST), "AVRO"))
    other = Schema(json.dumps(record(ID, AMOUNT, doc="of another subject")), "AVRO")
    schema_id = client.register_schema("returns-value", other)
    values: list[bytes | None] = [struct.pack(">bI", 0, schema_id) + bytes([4, 6])]
    table, bad = tmp_path / "orders", tmp_path / "bad"
    letters = DeadLetters(bad, error="error", max_fraction=1)
    sink = query.sink(table, transform=parsed(values, registry, "*"), dead_letters=letters)
    query.run(sink, 0, offset(0, {("orders", 0): (0, 1)}))
    assert (rows(table), len(rows(bad)), sink.replay(spark)) == ([], 1, 0)
    client.register_schema(SUBJECT, other)
    assert (sink.replay(spark), rows(table)) == (1, [("orders", 0, 0, 2, 3)])


@pytest.mark.parametrize(
    "parse",
    [
        lambda df, registry: decode.avro(df, "value", registry, subject=SUBJECT),
        lambda df, _: decode.debezium(df, "value", "id long", sequence="source.lsn"),
    ],
    ids=["avro", "debezium"],
)
@pytest.mark.parametrize("name", ["error", "Error"])  # one column for Spark
def test_a_column_of_numbers_where_the_reasons_belong_is_refused(
    spark: "SparkSession",
    registry: decode.Registry,
    parse: Callable[["DataFrame", decode.Registry], "DataFrame"],
    name: str,
) -> None:
    df = spark.createDataFrame([], f"{SCHEMA_OF_RECIPE}, {name} int")
    with pytest.raises(OptionError, match="the rows have a column error already, int: rename it, or name another"):
        parse(df, registry)


def test_the_recipe_for_json_schema_decodes_what_the_official_serializer_writes(
    spark: "SparkSession", server: SchemaRegistry
) -> None:
    recipe = re.findall(
        r"```python\n(.*?)```", (DOCS / "decode.md").read_text().partition("## JSON Schema")[2], re.DOTALL
    )
    namespace: dict[str, Any] = {}
    exec(recipe[0], namespace)
    properties = {"id": {"type": "integer"}, "amount": {"type": "number"}}
    text = json.dumps({"title": "Order", "type": "object", "properties": properties})
    serializer: Any = JSONSerializer(text, SchemaRegistryClient({"url": server.url}))
    context = SerializationContext("orders", MessageField.VALUE)
    values = [serializer({"id": 1, "amount": 2.5}, context), b"\0\0\0\0\1{broken", b"\0\0\0", None]
    df = spark.createDataFrame([("orders", 0, n, value) for n, value in enumerate(values)], SCHEMA_OF_RECIPE)
    assert [tuple(row) for row in namespace["parse"](df).orderBy("offset").collect()] == [
        ("orders", 0, 0, 1, 2.5, None),
        *(("orders", 0, n, None, None, "no JSON of an order") for n in (1, 2)),
        ("orders", 0, 3, None, None, None),
    ]


def test_the_recipe_for_protobuf_decodes_what_the_official_serializer_writes(
    spark: "SparkSession", server: SchemaRegistry, tmp_path: Path
) -> None:
    number = descriptor_pb2.FieldDescriptorProto
    described = descriptor_pb2.FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    for name in ("Order", "Return"):
        message = described.message_type.add(name=name)
        message.field.add(name="id", number=1, type=number.TYPE_INT64, label=number.LABEL_OPTIONAL)
        message.field.add(name="amount", number=2, type=number.TYPE_DOUBLE, label=number.LABEL_OPTIONAL)
    (tmp_path / "shop_pb2.py").write_text(AS_PROTOC.format(described.SerializeToString()))
    spark.sparkContext.addPyFile(str(tmp_path / "shop_pb2.py"))
    shop = importlib.import_module("shop_pb2")
    client, context = SchemaRegistryClient({"url": server.url}), SerializationContext("orders", MessageField.VALUE)
    serializers: list[Any] = [
        ProtobufSerializer(of, client, {"use.deprecated.format": False}) for of in (shop.Order, shop.Return)
    ]
    values = [serializers[0](shop.Order(id=1, amount=2.5), context), serializers[1](shop.Return(id=2), context)]
    values += [b"\0\0\0\0\1\0\xff", b"\0\0\0", None]
    recipe = re.findall(r"```python\n(.*?)```", (DOCS / "decode.md").read_text().partition("## Protobuf")[2], re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(recipe[0], namespace)
    df = spark.createDataFrame([("orders", 0, n, value) for n, value in enumerate(values)], SCHEMA_OF_RECIPE)
    assert [tuple(row) for row in namespace["parse"](df).orderBy("offset").collect()] == [
        ("orders", 0, 0, 1, 2.5, None),
        *(("orders", 0, n, None, None, "no order") for n in (1, 2, 3)),
        ("orders", 0, 4, None, None, None),
    ]


def test_a_column_of_errors_that_the_transform_lacks_is_refused(query: Query, tmp_path: Path) -> None:
    sink = query.sink(tmp_path / "orders", dead_letters=DeadLetters(tmp_path / "bad", error="why"))
    with pytest.raises(OptionError, match="error is 'why', but the sink's transform returns the columns topic"):
        query.run(sink, 0, offset(0, {("orders", 0): (0, 1)}))
    assert not (tmp_path / "orders").exists()
