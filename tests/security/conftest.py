"""The broker that all security tests share."""

from collections.abc import Iterator

import pytest

from security.certificates import Authority
from security.secured import PASSWORD, USER, SecuredBroker, TokenEndpoint, secured_broker
from security.token_function import CLIENT_ID


@pytest.fixture(scope="session")
def secured(jvm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority(folder, "ours")
    tokens = TokenEndpoint()
    with secured_broker(folder, authority) as broker:
        started = SecuredBroker(broker, folder, authority, tokens)
        started.add_user(USER, PASSWORD)
        for user in (USER, CLIENT_ID, "job"):
            started.allow_all(user)
        yield started
    tokens.close()
