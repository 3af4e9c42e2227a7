"""What ``DESCRIBE HISTORY`` tells of a table: the same as :mod:`history`, in any session that has Delta.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: Delta's
classes, the rows.

Each look is a Spark job, so few are made: one with the newest commits, and one for the ledger only where none of these
has it. Notes that are not of ours stay where they are.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from spark_group_source.delta import ledger, names, notes
from spark_group_source.delta.history import COMMITS_MAX, Aged, restored_to
from spark_group_source.delta.ledger import Ledger
from spark_group_source.delta.notes import Commit
from spark_group_source.group.offsets import StreamOffset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STEPS = (2, 20, COMMITS_MAX)
"""How many of the last commits are asked for, in turns: mostly there is our own last one, and one before it."""

SEARCH_STEPS = (1, 20, 1000)
"""The same, for a note that was just written."""

NOTE_CHARS_MAX = 32_000_000
"""The notes of a search are all in memory at once."""


def steps(note: str) -> list[int]:
    """How many commits to search for this note: those of others are about as long."""
    most = max(NOTE_CHARS_MAX // max(len(note), 1), 1)
    return sorted({min(commits, most) for commits in SEARCH_STEPS})


class Told:
    """The past of a table, from its newest version on, or from ``version``."""

    def __init__(self, spark: "SparkSession", table: str, *, version: int | None = None) -> None:
        self.table, self._spark, self._upto = table, spark, version
        self._rows: list[Commit] = []
        self._whole = False  # there is nothing before these

    @cached_property
    def version(self) -> int:
        if self._upto is not None:
            return self._upto
        self._load(STEPS[0])
        return self._rows[0].version

    def at(self, version: int) -> "Told":
        return Told(self._spark, self.table, version=version)

    def commits(self, *, after: int = -1) -> Iterator[Commit]:
        newest, seen = self.version, self.version + 1
        for limit in (len(self._rows), *STEPS):
            if limit > len(self._rows) and not self._whole:
                # One that goes on from an earlier version asks for the newer ones, too.
                self._load(limit)
            for commit in self._rows:
                if after < commit.version < seen and commit.version <= newest:
                    yield commit
                    seen = commit.version
            if self._whole or seen <= after + 1:
                return

    def groups(self) -> list[str]:
        noted = self._history(COMMITS_MAX).where(f"contains(userMetadata, '\"group\"') AND version <= {self.version}")
        found = (notes.docs(row[0]) for row in noted.select("userMetadata").collect())
        return sorted({str(doc["group"]) for docs in found for doc in docs})

    def ledger(self, group: str, known: Ledger | None = None) -> Ledger | None:
        """As :meth:`history.Past.ledger`.

        Args:
            known: one that stood in an earlier version, so that only newer commits need be looked at.
        """
        least = self.version + 1
        for commit in self._near() if known is None else self.commits(after=known.table_version):
            found, least = commit.ledger(group), commit.version
            if found is not None:
                return found
        if known is not None and least <= known.table_version + 1:
            return known
        return self.noted(group) or self._folded(group)

    def noted(self, group: str) -> Ledger | None:
        """The newest ledger of a group in any note."""
        row = self._newest(group)
        return None if row is None else Commit.of(row["version"], None, "", row["note"], None).ledger(group)

    def age_s(self, group: str) -> int | None:
        """How long ago that was written, by the clocks of the table's writers; None, if there is none."""
        row = self._newest(group)
        return None if row is None else int(row["age_s"])

    def _newest(self, group: str) -> Any:
        """The newest commit with a ledger of the group: its version, its note and its age."""
        from pyspark.sql import functions as F

        # As a former release wrote it, and as it is written now.
        marks = notes.mark(group), notes.mark(group).replace('","', '", "').replace('":', '": ', 2)
        its = F.contains(F.col("note"), F.lit(marks[0])) | F.contains(F.col("note"), F.lit(marks[1]))
        age_s = "unix_seconds(current_timestamp()) - unix_seconds(timestamp) AS age_s"
        for limit in (COMMITS_MAX, None):
            history = self._history(limit).selectExpr("version", "userMetadata AS note", age_s)
            row: Any = history.where(its & (F.col("version") <= self.version)).orderBy(F.desc("version")).first()
            if row is not None:
                return row
            if self.version < COMMITS_MAX:
                break
        return None

    def landed(self, note: str) -> int | None:
        """The version of a commit with this very note that came after this one, if there is one."""
        from pyspark.sql import functions as F

        its = F.when(F.col("userMetadata") == note, F.col("version"))
        for limit in steps(note):
            row: Any = self._history(limit).agg(F.max(its).alias("it"), F.min("version")).first()
            if row[0] is not None:
                return int(row[0]) if row[0] > self.version else None
            if row[1] <= self.version + 1:
                return None
        return None

    def recorded(self, offsets: Sequence[StreamOffset]) -> bool:
        """Whether one of the last commits is that of a batch with exactly these offsets."""
        from pyspark.sql import functions as F

        beginning, former = notes.beginning(offsets), notes.text(offsets, ())
        its = (F.col("userMetadata") == former) | F.startswith(F.col("userMetadata"), F.lit(beginning))
        for limit in steps(beginning):
            row: Any = self._history(limit).agg(F.max(its).alias("it"), F.count("*")).first()
            if row[0] or row[1] < limit:
                return bool(row[0])
        return False

    # --- looks ------------------------------------------------------------------------------------------------------

    def _history(self, limit: int | None = None) -> "DataFrame":
        last = "" if limit is None else f" LIMIT {limit}"
        return self._spark.sql(f"DESCRIBE HISTORY {names.sql_name(self.table)}{last}")

    def _load(self, limit: int) -> None:
        wanted = ("version", "operation", "operationParameters AS given", "readVersion AS read")
        note = "CASE WHEN contains(userMetadata, '\"group\"') THEN userMetadata END AS note"
        found = sorted(self._history(limit).selectExpr(*wanted, note).collect(), key=lambda row: -row["version"])
        self._rows = [self._commit(row.asDict()) for row in found]
        self._whole = len(found) < limit or found[-1]["version"] == 0

    def _commit(self, row: Mapping[str, Any]) -> Commit:
        to = restored_to(self._history, row["version"], row["given"]) if row["operation"] == "RESTORE" else None
        return Commit.of(row["version"], row["read"], row["operation"], row["note"], to)

    def _near(self) -> list[Commit]:
        """What is here without another look."""
        newest = self.version
        return [commit for commit in self._rows if commit.version <= newest]

    def _folded(self, group: str) -> Ledger | None:
        """The ledger that batches of former releases would have left, as far as the history goes back."""
        from pyspark.sql import functions as F

        token = f'"group":{json.dumps(group)}'
        history = self._history().where(F.col("version") <= self.version)
        its = F.when(F.contains(F.col("userMetadata"), F.lit(token)), F.col("userMetadata"))
        first: Any = history.selectExpr("min(version)").first()
        rows = history.select("version", its.alias("note")).where("note IS NOT NULL").orderBy("version").collect()
        found: Ledger | None = None
        for row in rows:
            for offset in Commit.of(row["version"], None, "", row["note"], None).batch(group):
                found = ledger.judge(offset, found).ledger
        if found is None and first[0] != 0:
            raise Aged(group, None)
        return found
