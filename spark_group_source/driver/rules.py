"""What a query's options say to the protocol: its limits and budgets.

Runs in: the stream reader. Deliberately absent: parsing (``options``), and what the budgets are for (``group``).
"""

from spark_group_source.group.rules import Rules
from spark_group_source.options.table import Options

HOLD_SHARE = 0.8
"""Of max.poll.interval.ms, which is the group's rebalance timeout: how long a revocation may be held. The rest is for
the commit, the member's answer and the time that passed at the broker before we heard of it."""
LEASE_SHARE = 0.6
"""Of the session timeout: how long an agent may be silent. The next member takes its place over before the group, which
may have heard of it later than we did, gives that to others."""


def rules_of(options: Options) -> Rules:
    """What the options say to the protocol."""
    return Rules(
        group=options.group_id,
        slots=1 if options.group_members == "auto" else options.group_members,
        auto_slots=options.group_members == "auto" and options.member_host != "driver",
        hold_budget_ms=int(options.max_poll_interval_ms * HOLD_SHARE),
        joining_budget_ms=options.max_poll_interval_ms + options.session_timeout_ms,
        broker_timeout_ms=options.broker_timeout_ms,
        classic=options.group_protocol == "classic",
        lease_ms=int(options.session_timeout_ms * LEASE_SHARE),
        member_host=options.member_host,
        leave_on_stop=options.leave_on_stop,
        starting=options.starting,
        fail_on_data_loss=options.fail_on_data_loss,
        max_offsets=options.max_offsets_per_trigger,
        min_offsets=options.min_offsets_per_trigger,
        max_delay_ms=options.max_trigger_delay_ms,
    )
