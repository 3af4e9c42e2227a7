"""Wrong passwords and certificates are reported when a query starts, with a remedy and without secrets."""

import pickle
from collections.abc import Callable

import pytest
from reading import read as read_batches
from streams import Engine

from security.certificates import Authority
from security.secured import SecuredBroker, query
from spark_group_source.errors import AccessDenied, GroupError
from spark_group_source.model import OffsetRange, TopicPartition

pytestmark = pytest.mark.broker

WRONG = "close-sesame-19bc"


def unknown_certificate(secured: SecuredBroker) -> dict[str, str]:
    return secured.mutual(Authority(secured.folder, "another").issue("stranger"))


def without_certificate(secured: SecuredBroker) -> dict[str, str]:
    client = secured.mutual(secured.folder)
    return {name: value for name, value in client.items() if "keystore" not in name}


def wrong_ca(secured: SecuredBroker) -> dict[str, str]:
    return secured.scram() | {"ssl.ca.location": str(Authority(secured.folder, "third").ca)}


def plain_text(secured: SecuredBroker) -> dict[str, str]:
    return {"bootstrap.servers": secured.broker.servers("TLS")}


CASES: dict[str, tuple[Callable[[SecuredBroker], dict[str, str]], str]] = {
    "wrong password": (lambda g: g.scram(password=WRONG), "kafka.sasl.* and kafka.ssl.*"),
    "unknown user": (lambda g: g.scram("nobody", WRONG), "kafka.sasl.* and kafka.ssl.*"),
    "wrong secret": (lambda g: g.oidc(WRONG), "kafka.sasl.* and kafka.ssl.*"),
    "expired certificate": (lambda g: g.mutual(g.authority.issue("late", days=0)), "client certificate"),
    "unknown certificate": (unknown_certificate, "client certificate"),
    "no certificate": (without_certificate, "client certificate"),
    "wrong CA": (wrong_ca, "ssl.ca.location"),
    "no TLS": (plain_text, "kafka.security.protocol"),
}


@pytest.mark.proves("G9", level="kafka")
@pytest.mark.parametrize("case", CASES)
def test_G9_wrong_credentials_fail_a_query_at_its_start(
    case: str, secured: SecuredBroker, group_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    client, message = CASES[case]
    given = query(client(secured), group_id, "t")
    with pytest.raises(GroupError) as failure, Engine(given) as engine:
        engine.step()
    assert message in str(failure.value)
    assert WRONG not in str(failure.value) + caplog.text


@pytest.mark.parametrize(
    "case", ["wrong password", "wrong secret", "wrong CA", "unknown certificate", "no certificate"]
)
def test_wrong_credentials_fail_a_task(case: str, secured: SecuredBroker, group_id: str) -> None:
    """Certificate files and environment variables of an executor may differ from the driver's."""
    given = Engine(query(CASES[case][0](secured), group_id, "t")).options
    with pytest.raises(AccessDenied, match="on every executor") as failure:
        list(
            read_batches(given.consumer_settings(), [OffsetRange(TopicPartition("t", 0), 0, 5)], progress_timeout_s=60)
        )
    assert given.bootstrap_servers in str(failure.value)
    assert WRONG not in repr(failure.value) + str(failure.value.fields)
    assert pickle.loads(pickle.dumps(failure.value)).fields == failure.value.fields
