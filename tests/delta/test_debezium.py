"""``decode.debezium`` on a real Spark, with changes as Debezium's connectors write them, in JSON and Avro.

Deliberately absent: a connector, and the merge itself (``test_merge.py``)."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F
from sink_helpers import Query, rows, values_from
from sink_source import offset

from spark_group_source import DeadLetters, Merge, OptionError, decode
from spark_group_source.delta import dead_letters

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("few_tasks")]

SCHEMA = "id BIGINT, name STRING, price DECIMAL(10, 2), photo BINARY"
LSN = "try_cast(source.lsn AS BIGINT)"
SOURCE = {"version": "3.1.0.Final", "connector": "postgresql", "db": "shop", "snapshot": "false", "xmin": None}


def row(number: int, name: str | None = "a", price: str | None = "1.50", photo: str | None = None) -> dict[str, Any]:
    return {"id": number, "name": name, "price": price, "photo": photo}


def change(
    op: str, before: dict[str, Any] | None, after: Any, lsn: int | str | None = 7, *, schema: bool = False
) -> dict[str, Any]:
    envelope = {
        "before": before,
        "after": after,
        "source": {**SOURCE, "sequence": '["1","7"]', "lsn": lsn},
        "transaction": {"id": "5:7", "total_order": 1},
        "op": op,
        "ts_ms": 1758000000000,
    }
    return {"schema": {"type": "struct", "fields": []}, "payload": envelope} if schema else envelope


def encoded(value: Any) -> bytes | None:
    return value if value is None or isinstance(value, bytes) else json.dumps(value).encode()


def frame(spark: "SparkSession", values: Sequence[Any]) -> "DataFrame":
    return spark.createDataFrame([(n, encoded(value)) for n, value in enumerate(values)], "n int, value binary")


def decoded(df: "DataFrame", *more: Any, **others: Any) -> list[tuple[Any, ...]]:
    """By number: the row, the operation, the sequence and the error."""
    found = decode.debezium(df, "value", *more, sequence=LSN, **others).orderBy("n").collect()
    assert {len(each) for each in found} <= {5}
    return [(each["n"], each["value"], each["op"], each["sequence"], each["error"]) for each in found]


@pytest.mark.parametrize("schema", [False, True])
def test_a_change_becomes_the_row_after_it_and_a_deletion_the_row_before_it(
    spark: "SparkSession", schema: bool
) -> None:
    values = [
        change("r", None, row(1), 3, schema=schema),
        change("c", None, row(2), 4, schema=schema),
        change("u", row(1), row(1, "b", None, "AQI="), 5, schema=schema),
        change("d", {"id": 2, "name": None}, None, 6, schema=schema),
        None,
    ]
    found = decoded(frame(spark, values), SCHEMA)
    assert [(n, op, lsn, error) for n, _, op, lsn, error in found] == [
        (0, "r", 3, None),
        (1, "c", 4, None),
        (2, "u", 5, None),
        (3, "d", 6, None),
    ], "the tombstone is left out"
    values_of = [tuple(value) for _, value, *_ in found]
    assert [(number, name, price and str(price), photo) for number, name, price, photo in values_of] == [
        (1, "a", "1.50", None),
        (2, "a", "1.50", None),
        (1, "b", None, bytearray(b"\1\2")),
        (2, None, None, None),
    ]


BROKEN = {
    b"": "the change has no operation",
    b"not json": "not a change in Debezium's format, or a value of another type than in the schema",
    b"[]": "not a change in Debezium's format, or a value of another type than in the schema",
    b'{"id": 1}': "the change has no operation",
    json.dumps(change("t", None, None)).encode(): "operation t is not a change of a row",
    json.dumps(change("u", row(1), None)).encode(): "the row is missing in operation u",
    json.dumps(change("d", None, None)).encode(): "the row is missing in operation d",
    json.dumps(change("c", None, row(1), None)).encode(): "the sequence is null",
    json.dumps(
        change("c", None, row(1, price="123456789.12"))
    ).encode(): "not a change in Debezium's format, or a value of another type than in the schema",
    json.dumps(
        change("u", None, row(1, decode.UNAVAILABLE))
    ).encode(): "column name was not logged by the database; set REPLICA IDENTITY FULL for its table",
    json.dumps(
        change("u", None, row(1, photo="X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=="))
    ).encode(): "column photo was not logged by the database; set REPLICA IDENTITY FULL for its table",
}


def test_a_change_that_cannot_be_decoded_has_no_row_and_the_reason(spark: "SparkSession") -> None:
    found = decoded(frame(spark, list(BROKEN)), SCHEMA)
    assert [(value, error) for _, value, _, _, error in found] == [(None, reason) for reason in BROKEN.values()]


def test_a_change_whose_sequence_is_no_number_cannot_be_decoded(spark: "SparkSession") -> None:
    changes = [change("u", None, row(n), lsn) for n, lsn in enumerate(("24023128", "x"))]
    found = decoded(frame(spark, changes), SCHEMA)
    assert [(sequence, error) for *_, sequence, error in found] == [(24023128, None), (None, "the sequence is null")]


@pytest.mark.parametrize(
    ("kind", "value", "other"),
    [
        ("ARRAY<STRING>", [decode.UNAVAILABLE], [decode.UNAVAILABLE, "b"]),
        ("ARRAY<BIGINT>", [*decode.UNAVAILABLE.encode()], []),
        ("ARRAY<STRING>", ["b68a35a7-17ad-35b3-af2a-ae46edb4545a"], []),  # uuid[]
        ("STRING", json.dumps({decode.UNAVAILABLE: decode.UNAVAILABLE}, separators=(",", ":")), "{}"),  # hstore
        ("MAP<STRING, STRING>", {decode.UNAVAILABLE: decode.UNAVAILABLE}, {"a": decode.UNAVAILABLE}),
    ],
)
def test_a_change_without_the_elements_of_a_large_value_cannot_be_decoded(
    spark: "SparkSession", kind: str, value: Any, other: Any
) -> None:
    """So Debezium sends arrays and hstore columns that a change did not touch."""
    changes = [change("u", None, {"id": 1, "tags": tags}) for tags in (value, other, None)]
    found = decoded(frame(spark, changes), f"id INT, tags {kind}")
    reason = "column tags was not logged by the database; set REPLICA IDENTITY FULL for its table"
    assert [error for *_, error in found] == [reason, None, None]


def test_the_row_before_a_deletion_may_lack_values_that_were_not_logged(spark: "SparkSession") -> None:
    deletion = change("d", row(1, decode.UNAVAILABLE), None)
    ((_, value, op, _, error),) = decoded(frame(spark, [deletion]), SCHEMA)
    assert (value["id"], op, error) == (1, "d", None)


def test_columns_are_added_for_what_is_asked_for_only(spark: "SparkSession") -> None:
    df = frame(spark, [change("c", None, row(1))])
    plain = decode.debezium(df, "value", "id INT", error="why")
    assert plain.schema.simpleString() == "struct<n:int,value:struct<id:int>,why:string,op:string>"


def test_the_column_of_reasons_may_have_a_dot(spark: "SparkSession") -> None:
    df = frame(spark, [change("c", None, row(1)), b"{"]).withColumn("decode.error", F.lit(None).cast("string"))
    found = decode.debezium(df, "value", "id INT", error="decode.error").orderBy("n").collect()
    assert [each["decode.error"] is None for each in found] == [True, False]


@pytest.mark.parametrize(
    ("columns", "schema", "reason"),
    [
        ("value binary", None, "changes in JSON need a schema of their rows"),
        ("value struct<op: string>", "id INT", "those that decode.avro decoded have one already"),
        ("value binary, op string", "id INT", "the rows have a column op already"),
    ],
)
def test_rows_that_do_not_fit_are_refused(spark: "SparkSession", columns: str, schema: str | None, reason: str) -> None:
    with pytest.raises(OptionError, match=re.escape(reason)):
        decode.debezium(spark.createDataFrame([], columns), "value", schema)


def test_changes_in_avro_keep_the_types_of_their_schema_and_the_reason_of_the_decoder(spark: "SparkSession") -> None:
    """What ``decode.avro`` returns for the schema that Debezium registers."""
    kind = "struct<id: bigint, name: string>"
    columns = f"n int, value struct<before: {kind}, after: {kind}, source: struct<lsn: bigint>, op: string>"
    values = [
        (0, (None, (1, "a"), (7,), "c"), None),
        (1, ((1, "a"), None, (8,), "d"), None),
        (2, None, "no schema id"),
        (3, None, None),
    ]
    df = spark.createDataFrame(values, f"{columns}, error string")
    assert decoded(df) == [
        (0, (1, "a"), "c", 7, None),
        (1, (1, "a"), "d", 8, None),
        (2, None, None, None, "no schema id"),
    ]


def test_G4_a_table_follows_a_database_and_what_cannot_be_merged_is_a_dead_letter(
    query: Query, spark: "SparkSession", tmp_path: Path
) -> None:
    """A deletion has no values but the key's, so constraints of the table are not asked of it."""
    table, bad = tmp_path / "customers", tmp_path / "bad"
    spark.sql(f"CREATE TABLE delta.`{table}` (id BIGINT, name STRING NOT NULL, sequence BIGINT) USING delta")
    spark.sql(f"ALTER TABLE delta.`{table}` ADD CONSTRAINT named CHECK (name <> '')")
    values = [
        change("c", None, row(1), 10),
        change("c", None, row(2), 11),
        change("c", None, row(3, None), 12),
        change("t", None, None, 13),
        change("d", {"id": 1}, None, 20),
        None,
        change("u", row(2), row(2, "late"), 9),
        change("u", row(2), row(2, "new"), 21),
        change("c", None, row(1, "late"), 19),
        change("c", None, row(4, ""), 22),
    ]
    replaced = values_from([encoded(value) for value in values])

    def parse(df: "DataFrame") -> "DataFrame":
        changes = decode.debezium(replaced(df), "value", "id BIGINT, name STRING", sequence=LSN)
        return changes.select("value.*", "op", "sequence", "topic", "partition", "offset", "error")

    merge = Merge(
        ["id"],
        delete_when="op = 'd'",
        sequence_by="sequence",
        deleted=str(tmp_path / "deleted"),
        without=["op", "topic", "partition", "offset"],
    )
    letters = DeadLetters(bad, error="error", max_fraction=1)
    sink = query.sink(table, transform=parse, merge=merge, dead_letters=letters)
    for number, (start, end) in enumerate([(0, 4), (4, 8), (8, 10)]):
        query.run(sink, number, offset(number, {("customers", 0): (start, end)}))
    assert rows(table) == [(2, "new", 21)]
    at = list(dead_letters.COLUMNS).index("error_class")
    assert [(each[2], each[at]) for each in rows(bad)] == [(2, "NOT_NULL"), (3, "TRANSFORM"), (9, "CHECK")]
