"""What reads records for a task and asks brokers for it, as ``ranges`` sees it.

Runs in: executor workers. Deliberately absent: the clients themselves (``native``, ``plain``) and how they are kept
(``fetch``).
"""

from collections.abc import Sequence
from typing import Protocol

from spark_group_source.executor.records import Bounds, Chunk, Event, Told
from spark_group_source.model import TopicPartition

METADATA_TIMEOUT_S = 1.0
"""How long an assignment waits for the leaders of topics that are new to its client. Without the question librdkafka
finds them by itself, but up to a second later; without an answer it does the same."""


class Client(Protocol):
    """An assigned-only consumer. One thread and one reader at a time."""

    pid: int
    """The process that made it, the only one in which its threads run."""

    def assign(self, positions: Sequence[tuple[TopicPartition, int]]) -> None:
        """Replace whatever is assigned; every position is the next offset to read."""

    def add(self, positions: Sequence[tuple[TopicPartition, int]]) -> None:
        """Assign these as well; the others go on undisturbed."""

    def drop(self, tps: Sequence[TopicPartition]) -> None:
        """Stop fetching these; the others go on undisturbed."""

    def move(self, tp: TopicPartition, offset: int) -> None:
        """Go on with one assigned partition at another offset."""

    def poll(self, rows_max: int, wait_s: float) -> Chunk: ...
    def positions(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]: ...
    def ask_topics(self, names: Sequence[str]) -> None:
        """Send a question about topics, instead of one that may be on its way."""

    def topics_told(self, wait_s: float) -> Told | Event | None:
        """Its answer; an event if there is none; None if it is not here yet."""

    def look_for_brokers(self) -> None:
        """Ask whichever broker answers who the others are. A question that waits for one that is dead goes on with it.
        Takes :data:`METADATA_TIMEOUT_S` at most."""

    def log_bounds(self, tp: TopicPartition, timeout_s: float) -> Bounds | Event:
        """Ask the partition's leader."""

    def clear(self) -> None: ...
    def close(self) -> None: ...


class Lease(Protocol):
    """A client that a reader has for itself."""

    client: Client

    def renew(self) -> None:
        """Close it and get a fresh one, with nothing assigned."""
