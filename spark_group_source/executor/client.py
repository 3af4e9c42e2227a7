"""What reads records for a task and asks brokers for it, as ``ranges`` sees it.

Runs in: executor workers. Deliberately absent: the clients themselves (``native``, ``plain``) and how they are kept
(``fetch``).
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from spark_group_source.executor.records import Bounds, Chunk, Event, Told
from spark_group_source.model import TopicPartition

METADATA_TIMEOUT_S = 1.0
"""How long an assignment waits for the leaders of topics that are new to its client. Without the question librdkafka
finds them by itself, but up to a second later; without an answer it does the same."""

ANSWER_S_MAX = 5.0
"""One question, with the search for who can answer it. Who still wants to know asks again."""


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
    def ask_topics(self, names: Sequence[str]) -> int:
        """Send a question about topics. Returns its number, for :meth:`answer`."""

    def ask_bounds(self, tp: TopicPartition) -> int:
        """Ask the partition's leader what its log holds."""

    def answer(self, numbers: Collection[int], wait_s: float) -> tuple[int, Told | Bounds | Event] | None:
        """The first of these questions that is answered, which takes :data:`ANSWER_S_MAX` at most: then it failed, and
        an event says why. None if that is not within ``wait_s``."""

    def give_up(self, numbers: Collection[int]) -> None:
        """Nobody waits for these answers any more."""

    def look_for_brokers(self) -> None:
        """Ask whichever broker answers who the others are. A question that waits for one that is dead goes on with it.
        Takes :data:`METADATA_TIMEOUT_S` at most."""

    def clear(self) -> None:
        """Nothing is assigned or asked any more."""

    def close(self) -> None: ...


class Lease(Protocol):
    """A client that a reader has for itself."""

    client: Client

    def renew(self) -> None:
        """Close it and get a fresh one, with nothing assigned."""
