"""Settings of the Kafka client whose value is a Python function. Options are text, so they name the function.

Runs in: every process that makes a client. Deliberately absent: pickled functions (only the name travels; each process
imports the function itself) and the use of the function, which is the client's.
"""

import logging
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

from spark_group_source.errors import OptionError

log = logging.getLogger(__name__)

TOKEN_CALLABLE: Final = "oauth_cb"
"""Called with ``sasl.oauthbearer.config`` or an empty text. Returns (token, expiry in seconds since the epoch[,
principal, extensions]), as confluent_kafka defines it."""
CALLABLES: Final = frozenset({TOKEN_CALLABLE})
"""Settings that may name a function."""


def import_callables(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with functions in place of their names.

    Raises:
        OptionError: a function cannot be imported in this process.
    """
    return {**settings, **{name: UserFunction(name, settings[name]) for name in CALLABLES & settings.keys()}}


def import_callable(setting: str, name: str) -> Callable[..., Any]:
    """Import the function that a setting names.

    Args:
        setting: without the prefix ``kafka.``.
        name: ``package.module:function``; the part after the colon may have dots.

    Raises:
        OptionError: the function cannot be imported here, or is not callable; the message says what to do.
    """
    module, _, path = name.strip().partition(":")
    if not module or not path:
        raise _refused(setting, name, "it must be package.module:function")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as exc:
        raise _refused(
            setting,
            name,
            f"{sys.executable} cannot import it ({type(exc).__name__}: {exc}). Ship its file with spark-submit "
            "--py-files (in a notebook: spark.addArtifacts(…, pyfile=True) or sparkContext.addPyFile(…)), or install "
            "its package on the driver and on every executor. For spark-group, add it to PYTHONPATH",
        ) from exc
    if not callable(found):
        raise _refused(setting, name, f"it is of type {type(found).__name__}, but must be a function")
    return found  # type: ignore[no-any-return]  # a module's attribute


class UserFunction:
    """A function of the user that the client calls. The client does not report why a call failed; ``failure`` does."""

    def __init__(self, setting: str, name: str) -> None:
        self._setting, self.name = setting, name
        self._function = import_callable(setting, name)
        self.failure = ""
        """The exception of the last call; empty if it succeeded."""

    def __call__(self, *arguments: Any) -> Any:
        try:
            found = self._function(*arguments)
        except Exception as exc:
            self.failure = f"{type(exc).__name__}: {exc}"
            log.warning("kafka.%s: %s raised %s", self._setting, self.name, self.failure)
            raise
        self.failure = ""
        return found


def _refused(setting: str, name: str, why: str) -> OptionError:
    return OptionError(f"option 'kafka.{setting}' is {name!r}; {why}", option=f"kafka.{setting}")
