"""The broker that all tests of security share."""

from collections.abc import Iterator

import pytest

from security.certificates import Authority
from security.guarded import PASSWORD, USER, Guarded, TokenEndpoint, guarded_broker
from security.token_function import CLIENT_ID


@pytest.fixture(scope="session")
def guarded(jvm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    authority = Authority(folder, "ours")
    tokens = TokenEndpoint()
    with guarded_broker(folder, authority) as broker:
        started = Guarded(broker, folder, authority, tokens)
        started.add_user(USER, PASSWORD)
        for user in (USER, CLIENT_ID, "job"):
            started.allow_all(user)
        yield started
    tokens.close()
