"""A broker with a listener for each kind of authentication, an authorizer, and a token endpoint.

Runs in: tests. Deliberately absent: expectations of queries (the tests), and a second broker: all tests share this one.
"""

import base64
import json
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its stubs hide them
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from kafka_helpers import ADMIN_S, Record, await_until, create_topic, produce_to
from kit.broker_cluster import BrokerCluster
from streams import options_of

from security.certificates import BROKER_NAMES, Authority
from security.token_function import CLIENT_ID, unsigned

USER, PASSWORD = "etl", "open-sesame-7f3a"
"""Of the SCRAM listener."""
CLIENT_SECRET = "s3cr3t-of-the-service"
"""Of the token endpoint."""
_Filter: Any = AclBindingFilter  # its stubs know no filter that leaves something open
LISTENERS = {"TLS": "SSL", "MUTUAL": "SSL", "SCRAM": "SASL_SSL", "OAUTH": "SASL_PLAINTEXT"}
LOGIN = "org.apache.kafka.common.security"
SESSION_S = 30
"""The longest time between two logins with a token; the broker closes the connection of a shorter token earlier."""


class TokenEndpoint:
    """Issues tokens for the client's secret (OAuth client credentials), on loopback."""

    def __init__(self) -> None:
        self.life_s = 600.0
        """The lifetime of tokens."""
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                endpoint._answer(self)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
                pass

        self._handler = Handler
        self._server = self._serving(0)
        self.url = f"http://127.0.0.1:{self._server.server_port}/token"

    def _serving(self, port: int) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", port), self._handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def restart(self) -> None:
        """Restart at the same address after :meth:`close`."""
        self._server = self._serving(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        request.rfile.read(int(request.headers.get("Content-Length", 0)))
        right = base64.b64encode(f"{CLIENT_ID}:{CLIENT_SECRET}".encode()).decode()
        known = request.headers.get("Authorization") == f"Basic {right}"
        answer: dict[str, object] = {"error": "invalid_client"}
        if known:
            answer = {"access_token": unsigned(self.life_s)[0], "expires_in": self.life_s}
        body = json.dumps(answer).encode()
        request.send_response(200 if known else 401)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)


@dataclass(frozen=True)
class Permission:
    """An entry of an access control list. An empty ``name`` means all resources of the kind."""

    user: str
    operation: str
    kind: str
    name: str = ""

    def binding(self, *, allow: bool) -> AclBinding:
        return AclBinding(
            ResourceType[self.kind],
            self.name or "*",
            ResourcePatternType.LITERAL,
            f"User:{self.user}",
            "*",
            AclOperation[self.operation],
            AclPermissionType.ALLOW if allow else AclPermissionType.DENY,
        )


@dataclass
class SecuredBroker:
    """The broker, and settings of its clients."""

    broker: BrokerCluster
    folder: Path
    authority: Authority
    tokens: TokenEndpoint
    admin: AdminClient = field(init=False)
    """Connects to the plain listener as a super user, like ``producer``."""
    producer: Producer = field(init=False)

    def __post_init__(self) -> None:
        self.admin = AdminClient({"bootstrap.servers": self.broker.bootstrap_servers, "log_level": 3})
        self.producer = Producer({"bootstrap.servers": self.broker.bootstrap_servers, "log_level": 3})

    # --- records -----------------------------------------------------------------------------------------------------

    def topic(self, name: str, partitions: int = 2) -> str:
        """Create a topic with this prefix."""
        return create_topic(self.admin, f"{name}-{uuid.uuid4().hex[:6]}", partitions)

    def produce(self, topic: str, records: Iterable[Record]) -> None:
        produce_to(self.producer, topic, records)

    # --- permissions ---------------------------------------------------------------------------------------------

    def add_user(self, user: str, password: str) -> None:
        """Create a user for the SCRAM listener."""
        how = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        changes: list[Any] = [UserScramCredentialUpsertion(user, how, password.encode())]
        for done in self.admin.alter_user_scram_credentials(changes).values():
            done.result(ADMIN_S)

    def allow(self, *permissions: Permission) -> None:
        self._change([permission.binding(allow=True) for permission in permissions])

    def deny(self, permission: Permission) -> None:
        """Deny the permission, even if another entry allows it, until :meth:`remove_denial`."""
        self._change([permission.binding(allow=False)])

    def remove_denial(self, permission: Permission) -> None:
        denied = permission.binding(allow=False)
        wanted = AclBindingFilter(
            *(denied.restype, denied.name, denied.resource_pattern_type, denied.principal, denied.host),
            *(denied.operation, denied.permission_type),
        )
        self.admin.delete_acls([wanted])[wanted].result(ADMIN_S)
        await_until(lambda: not self.admin.describe_acls(wanted).result(ADMIN_S), what=f"the end of {denied}")

    def allow_all(self, user: str) -> None:
        """Allow what a query needs on every topic, group and transactional id."""
        needs = [("READ", "TOPIC"), ("DESCRIBE", "TOPIC"), ("READ", "GROUP"), ("DESCRIBE", "GROUP")]
        needs += [("WRITE", "TRANSACTIONAL_ID"), ("DESCRIBE", "TRANSACTIONAL_ID")]
        self.allow(*(Permission(user, operation, kind) for operation, kind in needs))

    def _change(self, bindings: list[AclBinding]) -> None:
        for done in self.admin.create_acls(bindings).values():
            done.result(ADMIN_S)
        everything = _Filter(
            ResourceType.ANY, None, ResourcePatternType.ANY, None, None, AclOperation.ANY, AclPermissionType.ANY
        )
        wanted = set(map(str, bindings))
        await_until(
            lambda: wanted <= set(map(str, self.admin.describe_acls(everything).result(ADMIN_S))),
            what="the new permissions",
        )

    @contextmanager
    def trusting(self, ca: Path) -> Iterator[None]:
        """Let new connections with client certificates have one of this authority."""
        self._trust(ca)
        try:
            yield
        finally:
            self._trust(self.authority.ca)

    def _trust(self, ca: Path) -> None:
        prefix, (broker,) = "listener.name.mutual.ssl.truststore.", self.admin.list_topics(timeout=ADMIN_S).brokers
        values = {"type": "PEM", "location": str(ca)}
        entries = [
            ConfigEntry(prefix + name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in values.items()
        ]
        resource = ConfigResource(ResourceType.BROKER, str(broker), incremental_configs=entries)
        self.admin.incremental_alter_configs([resource])[resource].result(ADMIN_S)

    # --- settings of clients -----------------------------------------------------------------------------------------

    @property
    def trusted(self) -> dict[str, str]:
        return {"ssl.ca.location": str(self.authority.ca)}

    def tls(self) -> dict[str, str]:
        return {"bootstrap.servers": self.broker.servers("TLS"), "security.protocol": "SSL", **self.trusted}

    def mutual(self, certificate: Path) -> dict[str, str]:
        """With a client certificate, as Java's settings."""
        return {
            "bootstrap.servers": self.broker.servers("MUTUAL"),
            "security.protocol": "SSL",
            "ssl.truststore.location": str(self.authority.ca),
            "ssl.truststore.type": "PEM",
            "ssl.keystore.location": str(certificate),
            "ssl.keystore.type": "PEM",
        }

    def scram(self, user: str = USER, password: str = PASSWORD) -> dict[str, str]:
        return {
            "bootstrap.servers": self.broker.servers("SCRAM"),
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.jaas.config": f'{LOGIN}.scram.ScramLoginModule required username="{user}" password="{password}";',
            **self.trusted,
        }

    def oidc(self, secret: str = CLIENT_SECRET) -> dict[str, str]:
        """With tokens from the endpoint."""
        login = f'{LOGIN}.oauthbearer.OAuthBearerLoginModule required clientId="{CLIENT_ID}" clientSecret="{secret}";'
        return {
            **self.bearer(),
            "sasl.jaas.config": login,
            "sasl.login.callback.handler.class": f"{LOGIN}.oauthbearer.secured.OAuthBearerLoginCallbackHandler",
            "sasl.oauthbearer.token.endpoint.url": self.tokens.url,
        }

    def function(self, name: str) -> dict[str, str]:
        """With tokens of a Python function."""
        return {**self.bearer(), "oauth_cb": name}

    def bearer(self) -> dict[str, str]:
        """With tokens from another source."""
        return {
            "bootstrap.servers": self.broker.servers("OAUTH"),
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "OAUTHBEARER",
        }


def query(client: Mapping[str, str], group: str, topic: str, *, protocol: str = "classic") -> dict[str, str]:
    """Options of a query with these client settings."""
    named = {f"kafka.{name}": value for name, value in client.items()}
    return options_of("", group, protocol=protocol, subscribe=topic) | named


def secured_broker(folder: Path, authority: Authority) -> BrokerCluster:
    """Create the broker, without starting it. Clients of the plain listener are super users."""
    store = str(authority.issue("127.0.0.1", names=BROKER_NAMES))
    return BrokerCluster(
        listeners=LISTENERS,
        settings={
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": store,
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(authority.ca),
            "ssl.principal.mapping.rules": "RULE:^CN=([^,]*).*$/$1/,DEFAULT",
            "listener.name.mutual.ssl.client.auth": "required",
            "listener.name.scram.sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.scram.scram-sha-512.sasl.jaas.config": f"{LOGIN}.scram.ScramLoginModule required;",
            **_oauth("listener.name.oauth."),
        },
    )


def _oauth(prefix: str) -> Mapping[str, str]:
    login = f'{LOGIN}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";'
    validator = f"{LOGIN}.oauthbearer.internals.unsecured.OAuthBearerUnsecuredValidatorCallbackHandler"
    return {
        f"{prefix}sasl.enabled.mechanisms": "OAUTHBEARER",
        f"{prefix}oauthbearer.sasl.jaas.config": login,
        f"{prefix}oauthbearer.sasl.server.callback.handler.class": validator,
        f"{prefix}oauthbearer.connections.max.reauth.ms": str(SESSION_S * 1000),
    }
