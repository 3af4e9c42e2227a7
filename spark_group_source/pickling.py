"""Pickling for executors: unpickling fails with a clear error where the package is missing or has another version.

Runs in: the planner (pickles), every other process of the source (unpickles). Deliberately absent: what is pickled.

A task starts by unpickling the reader, which imports this package. If the import fails, Spark shows a stack trace of
its own serializer. So the reader is pickled as bytes, together with a function that Spark pickles by value, like every
function of a program's main module. The function reports what is missing before it unpickles the bytes."""

import types
from typing import Any

import spark_group_source


class CheckedPickle:
    """Base of classes that Spark pickles: unpickling checks the packages of the process first.

    Raises:
        SetupError: when unpickled where a package is missing, or has another version than on the driver.
    """

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        from pyspark import cloudpickle

        state = self.__getstate__()
        return _BY_VALUE, (spark_group_source.__version__, cloudpickle.dumps((type(self), state)))


def _unpickle(version: str, content: bytes) -> Any:
    """Check the packages, then unpickle. It runs where this module may be missing, so it uses only its arguments."""
    import importlib.util
    import pickle
    import socket
    import sys

    where = f"{sys.executable} on {socket.gethostname()}"
    problem = ""
    for name in ("spark_group_source", "confluent_kafka"):
        if not problem and name not in sys.modules and importlib.util.find_spec(name) is None:
            problem = (
                f"{where} has no package {name}. Install spark-group-source on every executor, or ship it with "
                "spark-submit --archives or --py-files"
            )
    if not problem:
        import spark_group_source as package

        installed = package.__version__
        if installed != version:
            problem = (
                f"{where} has spark-group-source {installed}, but the driver has {version}. Install the same version "
                "on the driver and on every executor"
            )
    if problem:
        # The package may be missing, so this class only has the name of its SetupError.
        raise type("SetupError", (ImportError,), {"__module__": "spark_group_source.errors"})(problem)
    kind, state = pickle.loads(content)
    found = object.__new__(kind)
    found.__dict__.update(state)
    return found


_BY_VALUE = types.FunctionType(_unpickle.__code__, {"__builtins__": __builtins__, "__name__": "__main__"}, "unpickle")
_BY_VALUE.__module__ = "__main__"
