"""The kafka.* options: refused settings, the settings of each client, and the translation of Java's settings."""

import ctypes
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from spark_group_source.errors import BrokerUnavailable, CommitFailed, OptionError
from spark_group_source.kafka.committer import TransactionalCommitter
from spark_group_source.kafka.environment import NEVER_JOINS, Environment, check_settings
from spark_group_source.kafka.group_offsets import GroupOffsets
from spark_group_source.model import TopicPartition
from spark_group_source.options.client import CONNECTION, REFUSED, is_secret
from spark_group_source.options.java import RENAMED, parse_jaas, translate
from spark_group_source.options.table import Options

ORDERS = {"kafka.bootstrap.servers": "127.0.0.1:1", "kafka.group.id": "etl", "subscribe": "orders"}
PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
OAUTH = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
KERBEROS = "com.sun.security.auth.module.Krb5LoginModule"


def options(**kafka: str) -> Options:
    return Options.parse(ORDERS | {f"kafka.{name.replace('_', '.')}": value for name, value in kafka.items()})


def refused(given: dict[str, str]) -> str:
    """The error for settings that are refused without the client library."""
    with pytest.raises(OptionError) as caught:
        Options.parse(ORDERS | {f"kafka.{name}": value for name, value in given.items()})
    return str(caught.value)


def refused_at_load(given: dict[str, str]) -> str:
    """The error for settings that librdkafka refuses."""
    with pytest.raises(OptionError) as caught:
        check_settings(Options.parse(ORDERS | {f"kafka.{name}": value for name, value in given.items()}))
    assert str(caught.value).startswith("the Kafka client (librdkafka) refuses an option: ")
    return str(caught.value)


def library_table() -> Iterator[tuple[str, str]]:
    """Every setting of the installed client library with "C", "P" or "*"."""
    folder = Path(confluent_kafka.__file__).parent.with_name("confluent_kafka.libs")
    found = sorted(folder.glob("librdkafka*"))
    if not found:
        pytest.skip("librdkafka is not at its usual place in the wheel of this platform")
    library, libc = ctypes.CDLL(str(found[0])), ctypes.CDLL(None)
    size, buffer = ctypes.c_size_t(), ctypes.c_char_p()
    libc.open_memstream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(buffer), ctypes.byref(size)))
    library.rd_kafka_conf_properties_show(stream)
    libc.fclose(stream)
    yield from re.findall(r"^([a-z0-9._]+) +\| *([CP*]) +\|", (buffer.value or b"").decode(), re.MULTILINE)


# ---- settings that the source controls


@pytest.mark.parametrize("name", [*sorted(REFUSED), "rebalance_cb", "oauthbearer_token_refresh_cb"])
def test_settings_that_the_source_controls_are_refused_with_any_value(name: str) -> None:
    for value in ("", "true"):
        with pytest.raises(OptionError) as caught:
            Options.parse(ORDERS | {f"kafka.{name}": value})
        assert f"option 'kafka.{name}' cannot be set to any value: " in str(caught.value)
        assert caught.value.fields == {"option": f"kafka.{name}"}


def test_consumers_always_set_isolation_level_protocol_commits_and_offset_reset() -> None:
    """The client never commits, stores or resets by itself."""
    names = ("isolation.level", "group.protocol", "enable.auto.commit", "enable.auto.offset.store", "auto.offset.reset")

    def stated(**kafka: str) -> list[str]:
        settings = options(**kafka).consumer_settings()
        return [settings[name] for name in names]

    assert stated() == ["read_committed", "classic", "false", "false", "error"]
    assert stated(isolation_level="read_uncommitted", group_protocol="CONSUMER")[:2] == ["read_uncommitted", "consumer"]


# ---- timeouts, protocols, assignors


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"": "1"}, "has no name after the dot"),
        ({"auto.offset.reset": "latest"}, "use startingOffsets"),
        ({"enable.auto.commit": "false"}, "commits offsets itself, after their rows are durable"),
        ({"value.deserializer": "x"}, "decode them with DataFrame functions"),
        ({"group.instance.id": "x"}, "set groupMembers"),
        ({"session.timeout.ms": "3000"}, "interval.ms (3000) must be below kafka.session.timeout.ms (3000)"),
        *[
            (
                {"session.timeout.ms": value},
                f"option 'kafka.session.timeout.ms' is {value!r}; it must be a positive integer",
            )
            for value in ("", "0", "-1", "1.5", "soon", "2147483648")
        ],
    ],
)
def test_invalid_settings_are_refused_with_an_alternative(given: dict[str, str], why: str) -> None:
    assert why in refused(given)


def test_timeouts_default_to_those_of_the_client_library() -> None:
    assert (options().session_timeout_ms, options().max_poll_interval_ms) == (45_000, 300_000)
    changed = options(session_timeout_ms="6000", max_poll_interval_ms="60000")
    assert (changed.session_timeout_ms, changed.max_poll_interval_ms) == (6_000, 60_000)


@pytest.mark.parametrize(
    ("given", "strategy"),
    [
        ("range", "range"),
        ("roundrobin, range", "roundrobin,range"),
        ("org.apache.kafka.clients.consumer.RangeAssignor", "range"),
        ("org.apache.kafka.clients.consumer.RoundRobinAssignor,range,range", "roundrobin,range"),
        ("org.apache.kafka.clients.consumer.CooperativeStickyAssignor", "cooperative-sticky"),
    ],
)
def test_assignors_may_have_java_class_names(given: str, strategy: str) -> None:
    made = options(partition_assignment_strategy=given)
    assert made.consumer_settings()["partition.assignment.strategy"] == strategy
    check_settings(made)


@pytest.mark.parametrize(
    "name",
    [
        "topic.metadata.refresh.interval.ms",
        "connections.max.idle.ms",
        "socket.timeout.ms",
        "transaction.timeout.ms",
        "message.max.bytes",
    ],
)
def test_an_integer_that_only_the_client_would_read_is_refused(name: str) -> None:
    for text in ("0x10", "", "1e4", "30 s", "010000"):
        with pytest.raises(OptionError, match=f"'kafka.{name}' is .*must be a decimal integer"):
            Options.parse(ORDERS | {f"kafka.{name}": text})
    for read in ("-1", "+60000"):
        Options.parse(ORDERS | {f"kafka.{name}": read})


@pytest.mark.parametrize(
    ("name", "text"),
    [("max.partition.fetch.bytes", "1m"), ("fetch.wait.max.ms", "2s"), ("queued.max.messages.kbytes", "0x10")],
)
def test_an_integer_with_a_unit_is_refused(name: str, text: str) -> None:
    """The client library reads the digits and ignores the rest."""
    with pytest.raises(OptionError, match=f"'kafka.{name}' is .*must be a decimal integer"):
        Options.parse(ORDERS | {f"kafka.{name}": text})


def test_a_poll_interval_that_is_no_number_is_refused_at_load_with_either_protocol() -> None:
    settings = {"kafka.group.protocol": "consumer", "kafka.max.poll.interval.ms": "soon"}
    with pytest.raises(OptionError, match=r"max\.poll\.interval\.ms"):
        Options.parse(ORDERS | settings)


@pytest.mark.parametrize("name", ["logger", "log.queue", "default.topic.config"])
def test_a_setting_whose_value_is_an_object_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"'kafka.{name}' cannot be set"):
        Options.parse(ORDERS | {f"kafka.{name}": "x"})


# ---- the settings of each client


NOT_OF_A_CONNECTION = {
    "allow.auto.create.topics", "background_event_cb", "bootstrap.servers", "builtin.features", "closesocket_cb",
    "connect_cb", "default_topic_conf", "enable.random.seed", "enabled_events", "error_cb", "interceptors",
    "internal.termination.signal", "log_cb", "log_level", "max.in.flight", "max.in.flight.requests.per.connection",
    "message.copy.max.bytes", "message.max.bytes", "opaque", "open_cb",
    "receive.message.max.bytes", "resolve_cb", "socket_cb", "ssl_ca", "ssl_certificate",
    "ssl_engine_callback_data", "ssl_key", "stats_cb", "throttle_cb", "topic.blacklist",
}  # fmt: skip
"""Settings of every client that admin clients and the producer of the commits do without."""


def test_every_client_gets_the_settings_that_apply_to_all_clients_and_no_others() -> None:
    table = dict(library_table())
    both = {name for name, clients in table.items() if clients == "*"}
    assert {name for name in both if not name.startswith(CONNECTION)} == NOT_OF_A_CONNECTION
    assert not [name for name, clients in table.items() if clients != "*" and name.startswith(CONNECTION)]
    assert set(RENAMED.values()) <= table.keys()


def test_producer_settings_do_not_reach_the_producer_that_commits_offsets(capfd: pytest.CaptureFixture[str]) -> None:
    made = options(
        session_timeout_ms="6000", fetch_min_bytes="1", client_id="me", acks="1", enable_idempotence="false",
        request_timeout_ms="30000", reconnect_backoff_ms="10000", fetch_max_wait_ms="100", receive_buffer_bytes="0",
    )  # fmt: skip
    check_settings(made)
    AdminClient({**made.admin_settings()})
    Producer(made.producer_settings() | {"transactional.id": "etl.1"})
    assert "CONFWARN" not in capfd.readouterr().err
    assert made.admin_settings()["client.id"] == "me"


def test_limits_of_fetch_responses_reach_only_clients_that_fetch_records() -> None:
    made = options(receive_message_max_bytes="2000000", fetch_max_bytes="1000000", message_max_bytes="1000000")
    check_settings(made)
    Consumer({**NEVER_JOINS, **made.admin_settings()}).close()


@pytest.mark.parametrize(
    ("given", "timeouts"),
    [
        ({}, ("10000", "60000")),
        ({"request_timeout_ms": "120000"}, ("60000", "60000")),
        ({"transaction_timeout_ms": "5000"}, ("5000", "5000")),
        ({"socket_timeout_ms": "120000", "transaction_timeout_ms": "180000"}, ("120000", "180000")),
    ],
)
def test_offsets_are_committed_with_any_request_and_transaction_timeout(
    given: Mapping[str, str], timeouts: tuple[str, str]
) -> None:
    class Refused(Environment):
        def producer(self, settings: Mapping[str, Any]) -> Any:
            super().producer(settings)
            used.append((settings["socket.timeout.ms"], settings["transaction.timeout.ms"]))
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    made, used = options(**given), list[tuple[str, str]]()
    check_settings(made)
    committer = TransactionalCommitter(
        made.producer_settings(), group="g", transactional_id="g.s", environment=Refused()
    )
    with pytest.raises(CommitFailed):
        committer.prepare()
    assert used == [timeouts], "librdkafka accepts them"


@pytest.mark.parametrize(("given", "used"), [(None, "5000"), ("180000", "5000"), ("0", "5000"), ("1000", "1000")])
def test_requests_to_coordinators_close_idle_connections_within_seconds(given: str | None, used: str) -> None:
    """Otherwise a call of librdkafka may not return after its timeout."""
    clients: list[Mapping[str, Any]] = []

    class Recorder(Environment):
        def producer(self, settings: Mapping[str, Any]) -> Any:
            clients.append(settings)
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

        consumer = producer

    settings = options(**{} if given is None else {"connections_max_idle_ms": given}).producer_settings()
    committer = TransactionalCommitter(settings, group="g", transactional_id="g.s", environment=Recorder())
    offsets = GroupOffsets(settings, group="g", environment=Recorder())
    for request in (committer.prepare, lambda: offsets.read([TopicPartition("t", 0)])):
        with pytest.raises((CommitFailed, BrokerUnavailable)):
            request()
    assert {client["connections.max.idle.ms"] for client in clients} == {used}


ASSIGNORS = "Use range and roundrobin in any order, or cooperative-sticky alone"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"default.api.timeout.ms": "5"}, "a setting of Java clients only, remove it"),
        ({"security.providers": "a.B"}, "a setting of Java clients only, remove it"),
        ({"fetch.min.byte": "5"}, 'No such configuration property: "fetch.min.byte"'),
        ({"request.timeout.ms": "600000"}, "outside allowed range 10..300000 (kafka.request.timeout.ms is the same"),
        ({"max.poll.interval.ms": "44999"}, "must be >= `session.timeout.ms`"),
        ({"partition.assignment.strategy": "org.apache.kafka.clients.consumer.StickyAssignor"}, ASSIGNORS),
        ({"partition.assignment.strategy": "range,cooperative-sticky"}, ASSIGNORS),
        ({"partition.assignment.strategy": " , "}, ASSIGNORS),
        *[
            ({name: value, "group.protocol": "consumer"}, f"`{name}` is not supported for `group.protocol=consumer`")
            for name, value in (
                ("session.timeout.ms", "5000"),
                ("heartbeat.interval.ms", "500"),
                ("partition.assignment.strategy", "range"),
            )
        ],
    ],
)
def test_settings_that_librdkafka_refuses_are_refused_at_load_with_a_hint(given: dict[str, str], why: str) -> None:
    assert why in refused_at_load(given)


def test_the_heartbeat_interval_may_be_just_below_the_session_timeout_and_the_poll_interval_equal_to_it() -> None:
    check_settings(options(max_poll_interval_ms="45000", heartbeat_interval_ms="44999"))


# ---- Java's settings


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({}, "1000"), ({"reconnect.backoff.max.ms": "7000"}, "7000"), ({"reconnect.backoff.ms": "5000"}, None)],
)
def test_reconnects_back_off_for_at_most_a_second_unless_configured(given: dict[str, str], wanted: str | None) -> None:
    made = options(**given)
    for settings in (made.consumer_settings(), made.admin_settings(), made.producer_settings()):
        assert settings.get("reconnect.backoff.max.ms") == wanted
    Consumer(made.consumer_settings()).close()


def jaas(module: str, options: str) -> dict[str, str]:
    return {"sasl.jaas.config": f"{module} required {options};".replace(" ;", ";")}


EVENT_HUBS = "Endpoint=sb://x.example/;SharedAccessKeyName=k;SharedAccessKey=a+b="
SECURED = "org.apache.kafka.common.security.oauthbearer.secured.OAuthBearerLoginCallbackHandler"
P12 = {"ssl.keystore.location": "/tls/client.p12", "ssl.keystore.password": "p"}


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        *[({java: "5"}, {name: "5"}) for java, name in RENAMED.items()],
        (passed_on := {"fetch.min.bytes": "5", "debug": "cgrp", "sasl.username": "me", "x.y": "z"}, passed_on),
        ({"ssl.endpoint.identification.algorithm": ""}, {"ssl.endpoint.identification.algorithm": "none"}),
        (both := {"metadata.max.age.ms": "9000", "topic.metadata.refresh.interval.ms": "3000"}, both),
        ({"fetch.max.wait.ms": "1", "fetch.wait.max.ms": "1"}, {"fetch.wait.max.ms": "1"}),
        # SASL
        ({"sasl.mechanism": "PLAIN", **jaas(PLAIN, r'username="me" password="p\"=;x"')},
         {"sasl.mechanism": "PLAIN", "sasl.username": "me", "sasl.password": 'p"=;x'}),
        (jaas(f"kafkashaded.{PLAIN}", f'username="$ConnectionString" password="{EVENT_HUBS}"'),
         {"sasl.mechanism": "PLAIN", "sasl.username": "$ConnectionString", "sasl.password": EVENT_HUBS}),
        ({"sasl.mechanism": "SCRAM-SHA-512", **jaas(SCRAM, "username=me password='it'")},
         {"sasl.mechanism": "SCRAM-SHA-512", "sasl.username": "me", "sasl.password": "it"}),
        ({"sasl.oauthbearer.token.endpoint.url": "https://login.example/token", "sasl.mechanism": "OAUTHBEARER",
          "sasl.login.callback.handler.class": SECURED,
          **jaas(OAUTH, 'clientId="id" clientSecret="s" scope="a b" extension_x="1" extension_y="2"')},
         {"sasl.oauthbearer.token.endpoint.url": "https://login.example/token", "sasl.mechanism": "OAUTHBEARER",
          "sasl.oauthbearer.method": "oidc", "sasl.oauthbearer.client.id": "id", "sasl.oauthbearer.client.secret": "s",
          "sasl.oauthbearer.scope": "a b", "sasl.oauthbearer.extensions": "x=1,y=2"}),
        ({"sasl.kerberos.service.name": "kafka", "sasl.kerberos.kinit.cmd": "/usr/bin/kinit",
          **jaas(KERBEROS, 'useKeyTab=true storeKey=true keyTab="/k.keytab" principal="u@R"')},
         {"sasl.mechanism": "GSSAPI", "sasl.kerberos.service.name": "kafka", "sasl.kerberos.keytab": "/k.keytab",
          "sasl.kerberos.principal": "u@R"}),
        (jaas(KERBEROS, "useTicketCache=true serviceName=kafka"),
         {"sasl.mechanism": "GSSAPI", "sasl.kerberos.min.time.before.relogin": "0",
          "sasl.kerberos.service.name": "kafka"}),
        # TLS: PEM in files, PEM in texts, PKCS12 by its type and by its ending
        ({"ssl.truststore.type": "PEM", "ssl.truststore.location": "/tls/ca.pem", "ssl.truststore.password": "unused",
          "ssl.keystore.type": "PEM", "ssl.keystore.location": "/tls/client.pem", "ssl.keystore.password": "unused",
          "ssl.key.password": "p"},
         {"ssl.ca.location": "/tls/ca.pem", "ssl.key.location": "/tls/client.pem",
          "ssl.certificate.location": "/tls/client.pem", "ssl.key.password": "p"}),
        ({"ssl.truststore.type": "PEM", "ssl.truststore.certificates": "CA", "ssl.keystore.type": "PEM",
          "ssl.keystore.certificate.chain": "CHAIN", "ssl.keystore.key": "KEY"},
         {"ssl.ca.pem": "CA", "ssl.certificate.pem": "CHAIN", "ssl.key.pem": "KEY"}),
        (P12 | {"ssl.keystore.type": "PKCS12"}, P12),
        (P12, P12),
    ],
)  # fmt: skip
def test_settings_of_java_clients_are_translated(given: dict[str, str], settings: dict[str, str]) -> None:
    assert translate(given) == settings


P12_OF_JKS = "keytool -importkeystore -srckeystore '/my tls/c.jks' -destkeystore '/my tls/c.p12' -deststoretype PKCS12"
PEM_OF_P12 = "openssl pkcs12 -in /t.p12 -nokeys -out /t.pem"
PEM_OF_JKS = f"keytool -importkeystore -srckeystore /t.jks -destkeystore /t.p12 -deststoretype PKCS12 && {PEM_OF_P12}"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"fetch.max.wait.ms": "1", "fetch.wait.max.ms": "2"},
         "'kafka.fetch.max.wait.ms' contradicts kafka.fetch.wait.max.ms"),
        (jaas(SCRAM, "username=me password=hunter2"), "is not set; it must be SCRAM-SHA-256 or SCRAM-SHA-512"),
        ({"sasl.mechanism": "PLAIN", **jaas(SCRAM, "username=me password=hunter2")},
         "names ScramLoginModule, but kafka.sasl.mechanism is PLAIN"),
        ({"sasl.mechanism": "SCRAM-SHA-256", **jaas(SCRAM, "username=me password=hunter2 tokenauth=true")},
         "does not support delegation tokens"),
        ({"sasl.mechanism": "OAUTHBEARER", **jaas(OAUTH, "clientId=id")}, "has no clientSecret"),
        ({"sasl.login.callback.handler.class": "com.example.Handler"}, "a Java class that cannot run here"),
        ({"sasl.mechanism": "AWS_MSK_IAM"}, "only Java clients support; use OAUTHBEARER with a function"),
        (jaas("software.amazon.msk.auth.iam.IAMLoginModule", ""), "kafka.oauth_cb=package.module:function"),
        (jaas(KERBEROS, ""), "has no keyTab"),
        (jaas("com.example.LdapLoginModule", ""), "names 'LdapLoginModule'; it must be PlainLoginModule"),
        ({"ssl.keystore.location": "/my tls/c.jks", "ssl.keystore.type": "JKS"}, f"Convert it with `{P12_OF_JKS}`"),
        ({"ssl.keystore.location": "/my tls/c.jks", "ssl.keystore.password": "hunter2"},
         f"{P12_OF_JKS}`, then set kafka.ssl.keystore.location to that .p12 file"),
        ({"ssl.truststore.location": "/t.jks", "ssl.truststore.password": "hunter2"},
         f"Convert it with `{PEM_OF_JKS}`, then set kafka.ssl.truststore.location to that .pem file"),
        ({"ssl.truststore.location": "/t.p12", "ssl.truststore.type": "PKCS12"}, f"Convert it with `{PEM_OF_P12}`"),
        ({"ssl.truststore.location": "/t.pem", "ssl.truststore.type": "PKCS12"}, "-in /t.pem -nokeys -out /t.pem.pem"),
        ({"ssl.keystore.location": "/k.p12", "ssl.keystore.type": "JKS"}, "/k.p12 -destkeystore /k.p12.p12 "),
        ({"ssl.truststore.location": "/trust"}, "keytool -importkeystore -srckeystore /trust -destkeystore /trust.p12"),
    ],
)  # fmt: skip
def test_java_settings_without_an_equivalent_are_refused_with_a_remedy(given: dict[str, str], why: str) -> None:
    with pytest.raises(OptionError) as caught:
        translate(given)
    assert why in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "hunter2", f"{PLAIN} required password", f'{PLAIN} required password="hunter2', f"{PLAIN} password=hunter2;",
     f"{PLAIN} perhaps password=hunter2;", f"{PLAIN} requiredpassword=hunter2;", f"{PLAIN} required password==hunter2;",
     f"{PLAIN} required password=a; {PLAIN} required password=hunter2;",
     r'a.B required x="\t";', r'a.B required x="\101";',  # to Java a tab and an A
     f"a.B required {'a=bbbb' * 1000};"],
)  # fmt: skip
def test_an_invalid_jaas_text_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(OptionError, match="is not one login module as in") as caught:
        parse_jaas(text)
    assert "hunter2" not in str(caught.value)


def test_a_backslash_in_a_jaas_text_escapes_the_next_character() -> None:
    assert parse_jaas(r'a.B required x="\\ \" \;" y="" z=\d;') == ("B", {"x": '\\ " ;', "y": "", "z": r"\d"})


# ---- secrets


@pytest.mark.parametrize(
    "name",
    ["sasl.password", "kafka.SASL.Password", "ssl.key.password", "ssl.key.pem", "sasl.jaas.config", "ssl.ca.pem",
     "sasl.oauthbearer.client.secret", "sasl.oauthbearer.config", "ssl.keystore.password", "my.token",
     "sasl.oauthbearer.assertion.private.key.passphrase"],
)  # fmt: skip
def test_G9_secret_settings_are_recognized(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["bootstrap.servers", "group.id", "sasl.username", "socket.keepalive.enable", "debug"])
def test_G9_other_settings_are_not_secret(name: str) -> None:
    assert not is_secret(name)
