"""Tasks of one executor, without Spark: a daemon that forks workers, as Spark's does, and their tasks one by one.

Runs in: processes of tests. Arguments, as one JSON object: ``task``, the arguments of a PlannedTask, or null as with
``memberHost=driver``; ``options``; ``workers``, which run one after the other; ``tasks`` of each worker, the next one
when the agents of the last one have ended, if ``wait``; ``threads``, how many more the workers' user may start after
a worker has read once; ``users``, whether each worker is another user; ``connect_s``, the limit for reaching the
stream reader; ``records``, how many of partition 0 each task reads. Prints a line for each task: how many agents its
worker has started. Log lines are on standard error.
"""

import json
import logging
import os
import subprocess
import sys
import traceback
from typing import Any

import restricted

from spark_group_source.agents import agent_folder
from spark_group_source.agents import task as agents_task
from spark_group_source.agents.channel.wire import Secret
from spark_group_source.agents.task import PlannedTask
from spark_group_source.model import OffsetRange, Piece, TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.source import GroupStreamReader, RangesPartition


def main(
    task: dict[str, Any] | None,
    options: dict[str, str],
    *,
    workers: int,
    tasks: int,
    wait: bool,
    threads: int | None,
    users: bool = False,
    connect_s: float,
    records: int,
) -> None:
    logging.basicConfig(level="WARNING", format="%(message)s")
    agents_task.CONNECT_S = connect_s
    agent_folder.PAUSE_S = agent_folder.PAUSE_S_MAX  # no agent is started again, however long the tasks take
    planned = None
    if task is not None:
        task |= {"addresses": tuple(map(tuple, task["addresses"])), "secret": Secret.from_hex(task["secret"])}
        planned = PlannedTask(**task)
    piece = Piece((OffsetRange(TopicPartition(options["subscribe"], 0), 0, records),))
    reader = GroupStreamReader(Options.parse(options))

    def read(planned: PlannedTask | None) -> None:
        assert sum(batch.num_rows for batch in reader.read(RangesPartition(piece, planned))) == records

    for _ in range(workers):
        if os.fork() == 0:
            try:
                if users:
                    restricted.become_user()
                if threads is not None:
                    read(None)  # the threads of a worker's Kafka client stay until it ends
                    restricted.limit_threads(threads)
                started: list[subprocess.Popen[bytes]] = []
                for _ in range(tasks):
                    read(planned)
                    started += [agent for agent in agent_folder._started if agent not in started]
                    sys.stdout.write(f"{len(started)}\n")
                    sys.stdout.flush()
                    for agent in started if wait else ():
                        agent.wait()
            except BaseException:  # noqa: BLE001 - a forked process ends here
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.wait()[1] != 0:
            sys.exit("a worker failed")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
