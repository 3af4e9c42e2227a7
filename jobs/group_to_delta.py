"""``spark-group run`` as a script for ``spark-submit``: Kafka topics, as a member of a group, into a Delta table.

Runs in: the user's driver, started by ``spark-submit jobs/group_to_delta.py …`` or ``python jobs/group_to_delta.py …``.
Deliberately absent: the job itself, which is ``spark_group_source.cli.run``.
"""

import sys

from spark_group_source.cli.app import app

if __name__ == "__main__":
    app(["run", *sys.argv[1:]])
