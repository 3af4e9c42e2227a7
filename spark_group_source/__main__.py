"""``python -m spark_group_source`` is ``spark-group``."""

from spark_group_source.cli.app import app

if __name__ == "__main__":
    app(prog_name="spark-group")
