"""Histories in which a mistake of the past shows: each fails as soon as its line is broken again.

Which line that is says the comment. Deliberately absent: what the quick run finds by itself (``test_mutants``).
"""

from kit.simulation import run


def test_positions_that_kafka_may_not_have_are_in_the_next_offset_seed_10() -> None:
    run(10, protocol="cooperative")  # group/plan.py: StreamOffset(owed=...)


def test_a_reset_while_a_batch_is_pending_makes_that_void_seed_3() -> None:
    run(3, protocol="consumer")  # group/positions.py: reset_seen, self._in_flight


def test_what_is_remembered_of_before_a_reset_is_void_seed_14() -> None:
    run(14, protocol="cooperative")  # group/positions.py: reset_seen, partition.position


def test_a_rewind_that_was_followed_is_not_undone_by_the_next_run_seed_33() -> None:
    run(33, protocol="cooperative")  # group/positions.py: take_answer, is_older


def test_G3_a_commit_that_waited_while_its_partitions_were_given_up_is_left_out_seed_7707() -> None:
    run(7707, protocol="consumer")  # members/member.py: Share.outdated, held


def test_a_batch_that_another_run_of_its_stream_has_written_is_in_nobodys_hands_seed_6021() -> None:
    run(6021, protocol="consumer")  # kit/invariants.py: processed_by, book.written


def test_a_run_may_wait_in_vain_for_what_an_older_run_of_its_stream_keeps_seed_6398() -> None:
    run(6398, protocol="consumer")  # kit/scene.py: _judge_timeout


def test_what_a_failed_run_still_writes_while_its_members_close_is_its_own_loss_seed_71398() -> None:
    run(71398, protocol="consumer")  # kit/invariants.py: _close, book.flight


def test_where_others_put_the_group_back_stays_true_though_a_run_committed_it_in_mid_batch_seed_85073() -> None:
    run(85073, protocol="eager")  # group/partition.py: is_older, _before


def test_a_topic_made_again_begins_at_its_first_record_also_where_others_had_the_partition_seed_85694() -> None:
    run(85694, protocol="eager")  # group/lookups.py: made_again


def test_what_was_read_of_a_topic_made_again_counts_though_its_log_shrank_since_seed_89829() -> None:
    run(89829, protocol="consumer")  # kit/invariants.py: processed_by, ever


def test_what_was_read_behind_a_start_at_the_end_is_a_loss_of_who_read_it_seed_90498() -> None:
    run(90498, protocol="cooperative")  # kit/invariants.py: processed_by, book.nobodys


def test_offsets_that_come_when_their_transaction_is_over_are_refused_seed_88462() -> None:
    run(88462, protocol="eager")  # kit/transactions.py: send, found.open


def test_a_run_that_is_over_looks_after_nobody_seed_200386() -> None:
    run(200386, protocol="eager", agents=True)  # kit/agents.py: wrong, Phase.CLOSED


def test_a_driver_that_was_frozen_has_its_time_to_miss_an_agent_seed_200701() -> None:
    run(200701, protocol="cooperative", agents=True)  # kit/agents.py: wrong, thawed_at_ms


def test_what_an_agent_was_told_its_run_may_never_hear_seed_200532() -> None:
    run(200532, protocol="cooperative", agents=True)  # kit/invariants.py: told, unheard


def test_a_run_reads_on_what_its_agent_lost_until_it_hears_of_it_seed_200545() -> None:
    run(200545, protocol="consumer", agents=True)  # kit/invariants.py: intends, unheard
