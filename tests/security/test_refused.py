"""Wrong passwords and certificates: told at the start, with what to check and without a secret."""

import pickle
from collections.abc import Callable

import pytest
from reading import read as read_batches
from streams import Engine

from security.certificates import Authority
from security.guarded import Guarded, query
from spark_group_source.errors import AccessDenied, GroupError
from spark_group_source.model import OffsetRange, TopicPartition

pytestmark = pytest.mark.broker

WRONG = "close-sesame-19bc"


def unknown(guarded: Guarded) -> dict[str, str]:
    return guarded.mutual(Authority(guarded.folder, "another").issue("stranger"))


def without_certificate(guarded: Guarded) -> dict[str, str]:
    client = guarded.mutual(guarded.folder)
    return {name: value for name, value in client.items() if "keystore" not in name}


def distrustful(guarded: Guarded) -> dict[str, str]:
    return guarded.scram() | {"ssl.ca.location": str(Authority(guarded.folder, "third").ca)}


def plain_text(guarded: Guarded) -> dict[str, str]:
    return {"bootstrap.servers": guarded.broker.servers("TLS")}


CASES: dict[str, tuple[Callable[[Guarded], dict[str, str]], str]] = {
    "wrong password": (lambda g: g.scram(password=WRONG), "kafka.sasl.* and kafka.ssl.*"),
    "unknown user": (lambda g: g.scram("nobody", WRONG), "kafka.sasl.* and kafka.ssl.*"),
    "wrong secret": (lambda g: g.oidc(WRONG), "kafka.sasl.* and kafka.ssl.*"),
    "expired certificate": (lambda g: g.mutual(g.authority.issue("late", days=0)), "client's certificate"),
    "unknown certificate": (unknown, "client's certificate"),
    "no certificate": (without_certificate, "client's certificate"),
    "wrong CA": (distrustful, "ssl.ca.location"),
    "no TLS": (plain_text, "kafka.security.protocol"),
}


@pytest.mark.proves("G9", level="kafka")
@pytest.mark.parametrize("case", CASES)
def test_a_query_is_refused_at_its_start(
    case: str, guarded: Guarded, group_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    client, says = CASES[case]
    given = query(client(guarded), group_id, "t")
    with pytest.raises(GroupError) as failure, Engine(given) as engine:
        engine.step()
    assert says in str(failure.value)
    assert WRONG not in str(failure.value) + caplog.text


@pytest.mark.parametrize(
    "case", ["wrong password", "wrong secret", "wrong CA", "unknown certificate", "no certificate"]
)
def test_a_task_is_refused_as_well(case: str, guarded: Guarded, group_id: str) -> None:
    """Certificates and passwords are files and variables of a machine: those of an executor may be others."""
    given = Engine(query(CASES[case][0](guarded), group_id, "t")).options
    with pytest.raises(AccessDenied, match="as the executors see them") as failure:
        list(read_batches(given.consumer_settings(), [OffsetRange(TopicPartition("t", 0), 0, 5)], deadline_s=60))
    assert given.bootstrap_servers in str(failure.value)
    assert WRONG not in repr(failure.value) + str(failure.value.fields)
    assert pickle.loads(pickle.dumps(failure.value)).fields == failure.value.fields
