"""Histories in which a mistake of the past shows: each fails as soon as its line is broken again.

Which line that is says the comment. Deliberately absent: what the quick run finds by itself (``test_mutants``).
"""

from spark_group_source.testing.simulation import run


def test_positions_that_kafka_may_not_have_are_in_the_next_offset_seed_3() -> None:
    run(3, protocol="cooperative")  # group/plan.py: StreamOffset(owed=...)


def test_a_rewind_during_the_last_batch_of_a_run_is_not_undone_by_the_next_run_seed_46() -> None:
    run(46, protocol="consumer")  # group/positions.py: _followed_back
