"""Settings that name a Python function: imported where it is used, refused at load() where it cannot be."""

import logging
import pickle
from typing import Any

import pytest

from spark_group_source.errors import BrokerUnavailable, OptionError
from spark_group_source.executor import fetch
from spark_group_source.executor.plain import PlainClient
from spark_group_source.kafka import check_settings
from spark_group_source.kafka.runtime import Runtime
from spark_group_source.options.callables import find, imported, needs_python
from spark_group_source.options.table import Options

HERE = "security.test_callables"
NOWHERE = "127.0.0.1:1"
calls: list[str] = []


def token(config: str) -> tuple[str, float]:
    calls.append(config)
    return "e30.e30.", 4e9


def refuses(config: str) -> tuple[str, float]:
    raise RuntimeError("no role is assumed")


def options(function: str, **more: str) -> Options:
    given = {
        "kafka.bootstrap.servers": NOWHERE,
        "kafka.group.id": "g",
        "subscribe": "t",
        "kafka.security.protocol": "SASL_PLAINTEXT",
        "kafka.sasl.mechanism": "OAUTHBEARER",
        "kafka.oauth_cb": function,
    }
    return Options.parse(given | more)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module:token", "No module named 'no_such_module'"),
        (f"{HERE}:no_such_function", "has no attribute 'no_such_function'"),
    ],
)
def test_a_function_that_cannot_be_imported_is_refused_at_load_with_what_to_do(name: str, says: str) -> None:
    with pytest.raises(OptionError, match=says) as failure:
        check_settings(options(name))
    assert "option 'kafka.oauth_cb' is" in str(failure.value)
    assert "--py-files" in str(failure.value)
    assert failure.value.fields == {"option": "kafka.oauth_cb"}


@pytest.mark.parametrize(("name", "says"), [("token", "package.module:function"), (f"{HERE}:NOWHERE", "it is a str")])
def test_what_is_no_functions_name_is_refused(name: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        find("oauth_cb", name)


def test_load_imports_the_function_and_does_not_call_it() -> None:
    calls.clear()
    check_settings(options(f"{HERE}:token"))
    assert calls == []


def test_options_travel_with_the_name_and_not_with_the_function() -> None:
    travelled: Options = pickle.loads(pickle.dumps(options(f"{HERE}:token")))
    assert travelled.consumer_settings()["oauth_cb"] == f"{HERE}:token"
    assert imported(travelled.consumer_settings())["oauth_cb"]("x") == ("e30.e30.", 4e9)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"kafka.sasl.mechanism": "PLAIN"}, "it must be OAUTHBEARER"),
        ({"kafka.sasl.oauthbearer.method": "oidc"}, "give one of the two"),
    ],
)
def test_tokens_from_two_places_or_for_another_mechanism_are_refused(more: dict[str, str], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        options(f"{HERE}:token", **more)


def test_other_functions_stay_refused() -> None:
    with pytest.raises(OptionError, match="it takes a function, and options are text"):
        options(f"{HERE}:token", **{"kafka.error_cb": f"{HERE}:token"})


def test_tasks_read_with_the_client_that_can_call_python_and_the_log_says_so() -> None:
    chosen = options(f"{HERE}:token")
    assert any("tasks read with the plain client" in note for note in chosen.notes)
    client = fetch._open(fetch._ClientKey(chosen.consumer_settings(), "auto"))
    try:
        assert isinstance(client, PlainClient)
    finally:
        client.close()
    assert needs_python({"sasl.oauthbearer.metadata.authentication.type": "aws_iam"})
    assert not needs_python({"sasl.oauthbearer.method": "oidc"})


@pytest.mark.slow
def test_a_function_that_raises_is_told_with_its_reason_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    """The client itself says only that it has no token."""
    settings: dict[str, Any] = {**options(f"{HERE}:refuses").admin_settings(), "log_level": 0}
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(BrokerUnavailable, match="gave no token: RuntimeError: no role is assumed"),
    ):
        Runtime().admin(settings)
    assert "security.test_callables:refuses raised RuntimeError" in caplog.text
