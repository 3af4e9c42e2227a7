"""Time the first steps of a new user from empty caches: ``python -m tests.bench first_minutes``.

The commands of docs/first.md, twice: with ``[local]``, and in an environment with its own Spark. HOME and the caches of
pip, Ivy and this package are empty. Needs the package registries, and port 9092. Prints a table of seconds.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEP_S_MAX = 1_800
"""The longest step; it ends a hang only."""
PRODUCER = """
import sys
from confluent_kafka import Producer
producer = Producer({"bootstrap.servers": "localhost:9092"})
for number in range(int(sys.argv[1]), int(sys.argv[2]) + 1):
    producer.produce("orders", b"%d" % number)
producer.flush()
"""


class NewUser:
    """A user with an empty home folder and a checkout without build results."""

    def __init__(self, home: Path) -> None:
        self.home, self.checkout, self.python = home, home / "checkout", home / "venv" / "bin" / "python"
        self.took_s: dict[str, float] = {}
        self._env = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "PYTHON"))}
        self._env |= {"HOME": str(home), "PATH": f"{self.python.parent}:{os.environ['PATH']}"}
        subprocess.run(["git", "clone", "-q", str(ROOT), str(self.checkout)], check=True)
        subprocess.run([sys.executable, "-m", "venv", str(home / "venv")], check=True)

    def step(self, name: str, *command: str) -> None:
        started_s = time.monotonic()
        done = subprocess.run(
            command, cwd=self.home, env=self._env, capture_output=True, text=True, timeout=STEP_S_MAX, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
        self.took_s[name] = time.monotonic() - started_s

    def install(self, *packages: str) -> None:
        self.step(f"`pip install {' '.join(packages)}`", "pip", "install", *packages)

    def first_rows(self) -> None:
        """Start a broker, and run the job of docs/first.md twice."""
        run = ["spark-group", "run", "--bootstrap-servers", "localhost:9092", "--group", "etl", "--topics", "orders"]
        run += ["--table", "lake/orders", "--checkpoint", "lake/checkpoint"]
        self.step("`spark-group broker start`", "spark-group", "broker", "start", "--topic", "orders:3")
        try:
            for name, first, last in (("`spark-group run`", 1, 300), ("`spark-group run` again", 301, 350)):
                subprocess.run([self.python, "-c", PRODUCER, str(first), str(last)], env=self._env, check=True)
                self.step(name, *run)
                count = "import deltalake; print(deltalake.DeltaTable('lake/orders').to_pyarrow_dataset().count_rows())"
                there = subprocess.check_output([self.python, "-c", count], cwd=self.home, env=self._env, text=True)
                assert int(there) == last, f"the table has {there.strip()} rows, not {last}"
            self.step(
                "`spark-group describe`",
                "spark-group",
                "describe",
                "--group",
                "etl",
                "--bootstrap-servers",
                "localhost:9092",
            )
        finally:
            self.step("`spark-group broker stop`", "spark-group", "broker", "stop")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench first_minutes", description=__doc__)
    parser.add_argument("--spark", default="pyspark", help="the requirement of the environment's own Spark")
    spark = parser.parse_args(arguments).spark
    for packages in (["./checkout[local]"], [spark, "./checkout"]):
        home = Path(tempfile.mkdtemp(prefix="new-user-"))
        try:
            user = NewUser(home)
            for package in packages:
                user.install(package)
            user.first_rows()
        finally:
            shutil.rmtree(home, ignore_errors=True)
        print("| step | seconds |\n|---|---|")
        for name, took_s in user.took_s.items():
            print(f"| {name} | {took_s:.0f} |")
        print(f"| all | {sum(user.took_s.values()):.0f} |\n", flush=True)
    return 0
