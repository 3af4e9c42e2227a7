"""Settings of the Kafka client whose value is a function: options are text, so they name one.

Runs in: every process that makes a client. Deliberately absent: pickled functions (only the name travels, and each
process imports it for itself) and what the client does with the function.
"""

import logging
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

from spark_group_source.errors import OptionError

log = logging.getLogger(__name__)

TOKEN_CALLABLE: Final = "oauth_cb"
"""Returns (token, when it expires in seconds since the epoch[, principal, extensions]), as the library asks for it; its
argument is ``sasl.oauthbearer.config``, or an empty text."""
CALLABLES: Final = frozenset({TOKEN_CALLABLE})
"""Settings that may name a function."""


def imported(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with functions in place of their names.

    Raises:
        OptionError: a name cannot be imported in this process.
    """
    return {**settings, **{name: Named(name, settings[name]) for name in CALLABLES & settings.keys()}}


def find(name: str, text: str) -> Callable[..., Any]:
    """Import the function that a setting names.

    Args:
        name: of the setting, without the prefix ``kafka.``.
        text: ``package.module:function``, or a name with dots behind the colon.

    Raises:
        OptionError: it cannot be imported here, or is no function; the message says what to do.
    """
    module, _, path = text.strip().partition(":")
    if not module or not path:
        raise _refused(name, text, "it must be package.module:function")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as exc:
        what = f"it cannot be imported by {sys.executable} ({type(exc).__name__}: {exc})"
        raise _refused(
            name,
            text,
            f"{what}. Give its file to spark-submit with --py-files (in a notebook: spark.addArtifacts(…, pyfile=True) "
            "or sparkContext.addPyFile(…)), or install its package on the driver and on every executor; the command "
            "spark-group finds it on PYTHONPATH",
        ) from exc
    if not callable(found):
        raise _refused(name, text, f"it is a {type(found).__name__}, and must be a function")
    return found  # type: ignore[no-any-return]  # a module's attribute


class Named:
    """A function as the client calls it. Of one that raises the client tells nobody why: ``failure`` does."""

    def __init__(self, setting: str, name: str) -> None:
        self._setting, self.name = setting, name
        self._function = find(setting, name)
        self.failure = ""

    def __call__(self, *arguments: Any) -> Any:
        try:
            found = self._function(*arguments)
        except Exception as exc:
            self.failure = f"{type(exc).__name__}: {exc}"
            log.warning("kafka.%s: %s raised %s", self._setting, self.name, self.failure)
            raise
        self.failure = ""
        return found


def _refused(name: str, text: str, why: str) -> OptionError:
    return OptionError(f"option 'kafka.{name}' is {text!r}; {why}", option=f"kafka.{name}")
