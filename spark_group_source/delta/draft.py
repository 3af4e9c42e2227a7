"""A batch as it is to be committed, whichever way it takes.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: how
that is decided (:mod:`ledger`), and how it is done (:mod:`doors`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_group_source.delta.checkpoint import PlannedBatch
from spark_group_source.delta.ledger import Ledger
from spark_group_source.model import OffsetRange

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a commit is made of.

    ``rows`` makes the rows to write; None, if there are none. ``ledgers``: as they are after it. ``without``: what is
    left out of the rows, which tells the rows of one attempt from another's. ``needed``: whether there is something to
    commit even if there are no rows.
    """

    planned: PlannedBatch
    rows: "Callable[[], DataFrame] | None"
    ledgers: Mapping[str, Ledger]
    without: tuple[OffsetRange, ...]
    needed: bool
