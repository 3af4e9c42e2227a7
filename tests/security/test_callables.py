"""Settings that name a Python function: imported in each process, refused at load() if it cannot be imported."""

import logging
import pickle
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kafka_helpers import await_until

from spark_group_source.error_codes import Meaning, Request, meaning
from spark_group_source.errors import BrokerUnavailable, OptionError
from spark_group_source.kafka.environment import Environment, check_settings
from spark_group_source.options.client import UserFunction, import_callable
from spark_group_source.options.table import Options
from spark_group_source.reader import range_reader

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
    ("name", "message"),
    [
        ("no_such_module:token", "No module named 'no_such_module'"),
        (f"{HERE}:no_such_function", "has no attribute 'no_such_function'"),
    ],
)
def test_a_function_that_cannot_be_imported_is_refused_at_load_with_a_remedy(name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message) as failure:
        check_settings(options(name))
    assert "option 'kafka.oauth_cb' is" in str(failure.value)
    assert "--py-files" in str(failure.value)
    assert failure.value.fields == {"option": "kafka.oauth_cb"}


@pytest.mark.parametrize(
    ("name", "message"), [("token", "package.module:function"), (f"{HERE}:NOWHERE", "of type str")]
)
def test_a_value_that_names_no_function_is_refused(name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        import_callable(name)


def test_load_imports_the_function_and_does_not_call_it() -> None:
    calls.clear()
    check_settings(options(f"{HERE}:token"))
    assert calls == []


def test_pickled_options_have_the_functions_name_and_not_the_function() -> None:
    travelled: Options = pickle.loads(pickle.dumps(options(f"{HERE}:token")))
    assert travelled.consumer_settings()["oauth_cb"] == f"{HERE}:token"
    assert UserFunction(travelled.consumer_settings()["oauth_cb"])("x") == ("e30.e30.", 4e9)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kafka.sasl.mechanism": "PLAIN"}, "it must be OAUTHBEARER"),
        ({"kafka.sasl.oauthbearer.method": "oidc"}, "set only one of the two"),
    ],
)
def test_two_token_sources_or_another_mechanism_are_refused(more: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        options(f"{HERE}:token", **more)


def test_other_callbacks_are_refused() -> None:
    with pytest.raises(OptionError, match="its value is a Python object, and options are text"):
        options(f"{HERE}:token", **{"kafka.error_cb": f"{HERE}:token"})


def test_a_reading_client_gets_its_token_from_the_function() -> None:
    calls.clear()
    given = options(f"{HERE}:token", **{"kafka.sasl.oauthbearer.config": "for=us"})
    range_reader.open_client(given.consumer_settings()).close()
    assert calls == ["for=us"]


def test_the_error_of_a_client_without_a_token_has_the_reason() -> None:
    """A missing token is retried: the function may succeed at the next call."""
    client = range_reader.open_client(options(f"{HERE}:refuses").consumer_settings())

    def is_reported() -> bool:
        client.serve(100)
        return bool(client.errors)

    await_until(is_reported, what="the error")
    code, words = client.errors[0]
    client.close()
    assert "the token function raised RuntimeError: no role is assumed" in words
    assert meaning(Request.FETCH, code, words) is Meaning.RETRY


AWS_IAM = {
    "bootstrap.servers": NOWHERE,
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanism": "OAUTHBEARER",
    "sasl.oauthbearer.method": "oidc",
    "sasl.oauthbearer.metadata.authentication.type": "aws_iam",
    "sasl.oauthbearer.config": "region=eu-central-1,audience=a",
    "sasl.oauthbearer.extensions": "one=two",
}


def test_a_reading_client_uses_confluent_kafkas_function_for_aws_iam(monkeypatch: pytest.MonkeyPatch) -> None:
    """librdkafka itself does not support aws_iam; the Python package does."""
    calls.clear()
    made: list[tuple[str, str | None]] = []

    def create_handler(config: str, extensions: str | None) -> Callable[[str], tuple[str, float]]:
        made.append((config, extensions))
        return token

    package: Any = SimpleNamespace(create_handler=create_handler)
    monkeypatch.setitem(sys.modules, "confluent_kafka._oauthbearer.aws.aws_autowire", package)
    range_reader.open_client(AWS_IAM).close()
    assert made == [("region=eu-central-1,audience=a", "one=two")]
    assert calls == ["region=eu-central-1,audience=a"]


def test_aws_iam_without_its_package_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "confluent_kafka._oauthbearer.aws.aws_autowire", raising=False)
    with pytest.raises(OptionError, match=r"pip install 'confluent-kafka\[oauthbearer-aws\]'` on every executor"):
        range_reader.open_client(AWS_IAM)


@pytest.mark.slow
def test_a_function_that_raises_is_reported_with_its_reason_and_called_again(caplog: pytest.LogCaptureFixture) -> None:
    """The client itself reports only that it has no token."""
    settings: dict[str, Any] = {**options(f"{HERE}:refuses").admin_settings(), "log_level": 0}
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(BrokerUnavailable, match="returned no token: RuntimeError: no role is assumed"),
    ):
        Environment().admin(settings)
    assert "security.test_callables:refuses raised RuntimeError" in caplog.text
