"""What travels to executors, packed so that one without the package can say so.

Runs in: the planner (packs), every other process of the source (opens). Deliberately absent: what is in it.

A task begins by unpickling the reader, which imports this package. Where that fails, Spark shows a stack trace of its
own serializer. So the reader travels as bytes beside a function that Spark's pickler takes along by value, as it does
with every function of a program's main module, and which can say what is missing before it opens them.
"""

import types
from typing import Any

import spark_group_source


class Packed:
    """Base of what Spark pickles: an instance arrives with its class and state, or with one line that says why not."""

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        from pyspark import cloudpickle

        state = self.__getstate__()
        return _BY_VALUE, (spark_group_source.__version__, cloudpickle.dumps((type(self), state)))


def _open(version: str, content: bytes) -> Any:
    """Open what was packed. It runs where this module may be missing: it knows nothing but its arguments."""
    import importlib.util
    import pickle
    import socket
    import sys

    where = f"the Python of {socket.gethostname()}, {sys.executable},"
    trouble = ""
    for name in ("spark_group_source", "confluent_kafka"):
        if not trouble and name not in sys.modules and importlib.util.find_spec(name) is None:
            trouble = (
                f"{where} has no package {name}. Install spark-group-source on every executor, or send it along: "
                "spark-submit --archives or --py-files"
            )
    if not trouble:
        import spark_group_source as ours

        there = ours.__version__
        if there != version:
            trouble = (
                f"{where} has spark-group-source {there}, and the driver {version}. Install one of them everywhere"
            )
    if trouble:
        # Ours is what may be missing; this one is shown as if it were not.
        raise type("SetupError", (ImportError,), {"__module__": "spark_group_source.errors"})(trouble)
    kind, state = pickle.loads(content)
    opened = object.__new__(kind)
    opened.__dict__.update(state)
    return opened


_BY_VALUE = types.FunctionType(_open.__code__, {"__builtins__": __builtins__, "__name__": "__main__"}, "open_parcel")
_BY_VALUE.__module__ = "__main__"
