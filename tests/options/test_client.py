"""The kafka.* settings: whose they are, which client gets which, and what Java's names become."""

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient

from spark_group_source.errors import OptionError
from spark_group_source.kafka.settings import check_settings
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
    """What is said of settings that are refused without asking the library."""
    with pytest.raises(OptionError) as caught:
        Options.parse(ORDERS | {f"kafka.{name}": value for name, value in given.items()})
    return str(caught.value)


def refused_at_load(given: dict[str, str]) -> str:
    """What is said of those that librdkafka refuses."""
    with pytest.raises(OptionError) as caught:
        check_settings(Options.parse(ORDERS | {f"kafka.{name}": value for name, value in given.items()}))
    assert str(caught.value).startswith("the Kafka client (librdkafka) refuses an option: ")
    return str(caught.value)


def library_table() -> Iterator[tuple[str, str]]:
    """Every setting of the installed client library with "C", "P" or "*"."""
    folder = Path(confluent_kafka.__file__).parent.with_name("confluent_kafka.libs")
    found = sorted(folder.glob("librdkafka*"))
    if not found:
        pytest.skip("the client library is not where this platform's wheel usually puts it")
    library, libc = ctypes.CDLL(str(found[0])), ctypes.CDLL(None)
    size, buffer = ctypes.c_size_t(), ctypes.c_char_p()
    libc.open_memstream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(buffer), ctypes.byref(size)))
    library.rd_kafka_conf_properties_show(stream)
    libc.fclose(stream)
    yield from re.findall(r"^([a-z0-9._]+) +\| *([CP*]) +\|", (buffer.value or b"").decode(), re.MULTILINE)


# ---- whose they are


@pytest.mark.parametrize("name", [*sorted(REFUSED), "rebalance_cb", "oauthbearer_token_refresh_cb"])
@pytest.mark.parametrize("value", ["", "false", "true", "none"])
def test_B11_settings_of_the_source_are_refused_whatever_the_value(name: str, value: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse(ORDERS | {f"kafka.{name}": value})
    assert f"option 'kafka.{name}' cannot be set, whatever the value: " in str(caught.value)
    assert caught.value.fields == {"option": f"kafka.{name}"}


def test_B11_the_reasons_say_what_to_use_instead() -> None:
    assert "use startingOffsets" in refused({"auto.offset.reset": "latest"})
    assert "committed only after their rows are durable" in refused({"enable.auto.commit": "false"})
    assert "decode them with DataFrame functions" in refused({"value.deserializer": "x"})
    assert "set groupMembers" in refused({"group.instance.id": "x"})


def test_a_setting_without_a_name_is_refused() -> None:
    assert "has no name behind the dot" in refused({"": "1"})


def test_B27_read_committed_is_the_default_and_is_always_stated() -> None:
    assert options().consumer_settings()["isolation.level"] == "read_committed"
    assert options(isolation_level="read_uncommitted").consumer_settings()["isolation.level"] == "read_uncommitted"


def test_the_client_never_commits_stores_or_resets_by_itself() -> None:
    settings = options().consumer_settings()
    assert settings["enable.auto.commit"] == settings["enable.auto.offset.store"] == "false"
    assert settings["auto.offset.reset"] == "error"


def test_the_group_protocol_is_always_stated() -> None:
    assert options().consumer_settings()["group.protocol"] == "classic"
    assert options(group_protocol="CONSUMER").consumer_settings()["group.protocol"] == "consumer"


# ---- timeouts, protocols, assignors


@pytest.mark.parametrize(
    ("name", "value"),
    [("session.timeout.ms", "5000"), ("heartbeat.interval.ms", "500"), ("partition.assignment.strategy", "range")],
)
def test_with_the_consumer_protocol_the_brokers_settings_are_refused(name: str, value: str) -> None:
    said = refused_at_load({name: value, "group.protocol": "consumer"})
    assert f"`{name}` is not supported for `group.protocol=consumer`" in said


def test_heartbeats_must_be_below_the_session_and_polls_not_below_it() -> None:
    assert "kafka.heartbeat.interval.ms (3000) must be below kafka.session.timeout.ms (3000)" in refused(
        {"session.timeout.ms": "3000"}
    )
    assert "must be >= `session.timeout.ms`" in refused_at_load({"max.poll.interval.ms": "44999"})
    check_settings(options(max_poll_interval_ms="45000", heartbeat_interval_ms="44999"))


@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "soon", "2147483648"])
def test_a_timeout_must_be_a_whole_number(value: str) -> None:
    assert f"option 'kafka.session.timeout.ms' is {value!r}; it must be a whole number" in refused(
        {"session.timeout.ms": value}
    )


def test_the_timeouts_that_others_need_have_the_clients_defaults() -> None:
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
def test_assignors_may_be_named_as_in_java(given: str, strategy: str) -> None:
    made = options(partition_assignment_strategy=given)
    assert made.consumer_settings()["partition.assignment.strategy"] == strategy
    check_settings(made)


@pytest.mark.parametrize(
    "given", ["org.apache.kafka.clients.consumer.StickyAssignor", "range,cooperative-sticky", " , "]
)
def test_other_assignors_and_mixed_kinds_are_refused_with_those_that_there_are(given: str) -> None:
    said = refused_at_load({"partition.assignment.strategy": given})
    assert "Use range and roundrobin in any order, or cooperative-sticky alone" in said


# ---- which client gets which


NOT_OF_A_CONNECTION = {
    "allow.auto.create.topics", "background_event_cb", "bootstrap.servers", "builtin.features", "closesocket_cb",
    "connect_cb", "default_topic_conf", "enable.random.seed", "enabled_events", "error_cb", "interceptors",
    "internal.termination.signal", "log_cb", "log_level", "max.in.flight", "max.in.flight.requests.per.connection",
    "message.copy.max.bytes", "message.max.bytes", "opaque", "open_cb", "resolve_cb", "socket_cb", "ssl_ca",
    "ssl_certificate", "ssl_engine_callback_data", "ssl_key", "stats_cb", "throttle_cb", "topic.blacklist",
}  # fmt: skip
"""Settings of every client that admin clients and the producer of the commits do without."""


def test_a_setting_of_every_client_reaches_every_client_and_those_of_one_kind_do_not() -> None:
    table = dict(library_table())
    both = {name for name, clients in table.items() if clients == "*"}
    assert {name for name in both if not name.startswith(CONNECTION)} == NOT_OF_A_CONNECTION
    assert not [name for name, clients in table.items() if clients != "*" and name.startswith(CONNECTION)]
    assert set(RENAMED.values()) <= table.keys()


def test_a_producers_setting_does_not_reach_the_producer_of_the_commits(capfd: pytest.CaptureFixture[str]) -> None:
    made = options(
        session_timeout_ms="6000", fetch_min_bytes="1", client_id="me", acks="1", enable_idempotence="false",
        request_timeout_ms="30000", reconnect_backoff_ms="10000", fetch_max_wait_ms="100", receive_buffer_bytes="0",
    )  # fmt: skip
    check_settings(made)
    AdminClient({**made.admin_settings()})
    Producer(made.producer_settings() | {"transactional.id": "etl.1"})
    assert "CONFWARN" not in capfd.readouterr().err
    assert made.admin_settings()["client.id"] == "me"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"default.api.timeout.ms": "5"}, "only Java clients know it, remove it"),
        ({"security.providers": "a.B"}, "only Java clients know it, remove it"),
        ({"fetch.min.byte": "5"}, 'No such configuration property: "fetch.min.byte"'),
        ({"request.timeout.ms": "600000"}, "outside allowed range 10..300000 (kafka.request.timeout.ms is the same"),
    ],
)
def test_what_the_library_refuses_is_refused_at_load_with_a_hint(given: dict[str, str], why: str) -> None:
    assert why in refused_at_load(given)


# ---- Java's names


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({}, "1000"), ({"reconnect.backoff.max.ms": "7000"}, "7000"), ({"reconnect.backoff.ms": "5000"}, None)],
)
def test_a_node_that_is_back_is_found_within_a_second_unless_the_user_says_otherwise(
    given: dict[str, str], wanted: str | None
) -> None:
    made = options(**given)
    for settings in (made.consumer_settings(), made.admin_settings(), made.producer_settings()):
        assert settings.get("reconnect.backoff.max.ms") == wanted
    Consumer(made.consumer_settings()).close()


def test_every_renamed_setting_is_translated() -> None:
    for java, name in RENAMED.items():
        assert translate({java: "5"}) == ({name: "5"}, [])


def test_settings_of_the_library_pass_unchanged() -> None:
    given = {"fetch.min.bytes": "5", "debug": "cgrp", "sasl.username": "me", "ssl.ca.location": "/ca.pem", "x.y": "z"}
    assert translate(given) == (given, [])


def test_no_check_of_host_names_is_written_as_the_library_writes_it() -> None:
    assert translate({"ssl.endpoint.identification.algorithm": ""})[0] == {
        "ssl.endpoint.identification.algorithm": "none"
    }


def test_the_librarys_own_metadata_settings_stay_when_both_are_given() -> None:
    given = {"metadata.max.age.ms": "9000", "topic.metadata.refresh.interval.ms": "3000"}
    assert translate(given) == (given, [])


def test_a_java_name_and_its_equal_must_not_contradict() -> None:
    with pytest.raises(
        OptionError, match=r"'kafka.fetch.max.wait.ms' says something else than kafka.fetch.wait.max.ms"
    ):
        translate({"fetch.max.wait.ms": "1", "fetch.wait.max.ms": "2"})
    assert translate({"fetch.max.wait.ms": "1", "fetch.wait.max.ms": "1"})[0] == {"fetch.wait.max.ms": "1"}


# ---- SASL


def test_a_plain_login_becomes_user_and_password() -> None:
    settings, notes = translate(
        {"sasl.mechanism": "PLAIN", "sasl.jaas.config": f'{PLAIN} required username="me" password="p\\"=;x";'}
    )
    assert settings == {"sasl.mechanism": "PLAIN", "sasl.username": "me", "sasl.password": 'p"=;x'}
    assert notes == []


def test_a_shaded_class_and_an_event_hubs_password_are_read() -> None:
    secret = "Endpoint=sb://x.example/;SharedAccessKeyName=k;SharedAccessKey=a+b="
    jaas = f'kafkashaded.{PLAIN} required username="$ConnectionString" password="{secret}";'
    settings, _ = translate({"sasl.jaas.config": jaas})
    assert settings == {"sasl.mechanism": "PLAIN", "sasl.username": "$ConnectionString", "sasl.password": secret}


def test_a_scram_login_needs_to_know_which() -> None:
    jaas = f"{SCRAM} required username=me password='it';"
    settings, _ = translate({"sasl.mechanism": "SCRAM-SHA-512", "sasl.jaas.config": jaas})
    assert settings == {"sasl.mechanism": "SCRAM-SHA-512", "sasl.username": "me", "sasl.password": "it"}
    with pytest.raises(OptionError, match="is not set; it must be SCRAM-SHA-256 or SCRAM-SHA-512"):
        translate({"sasl.jaas.config": jaas})
    with pytest.raises(OptionError, match=r"names ScramLoginModule, but kafka.sasl.mechanism is PLAIN"):
        translate({"sasl.mechanism": "PLAIN", "sasl.jaas.config": jaas})
    with pytest.raises(OptionError, match="delegation tokens are not supported"):
        translate({"sasl.mechanism": "SCRAM-SHA-256", "sasl.jaas.config": jaas.replace(";", " tokenauth=true;")})


def test_an_oauth_login_becomes_an_oidc_client() -> None:
    settings, notes = translate(
        {
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.token.endpoint.url": "https://login.example/token",
            "sasl.login.callback.handler.class": "org.apache.kafka.common.security.oauthbearer.secured."
            "OAuthBearerLoginCallbackHandler",
            "sasl.jaas.config": f'{OAUTH} required clientId="id" clientSecret="s" scope="a b" extension_x="1" '
            'extension_y="2";',
        }
    )
    assert settings == {
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.token.endpoint.url": "https://login.example/token",
        "sasl.oauthbearer.client.id": "id",
        "sasl.oauthbearer.client.secret": "s",
        "sasl.oauthbearer.scope": "a b",
        "sasl.oauthbearer.extensions": "x=1,y=2",
    }
    assert notes == []
    with pytest.raises(OptionError, match="lacks clientSecret"):
        translate({"sasl.mechanism": "OAUTHBEARER", "sasl.jaas.config": f"{OAUTH} required clientId=id;"})


def test_other_callback_handlers_and_the_msk_mechanism_are_refused() -> None:
    with pytest.raises(OptionError, match="a Java class that cannot run here"):
        translate({"sasl.login.callback.handler.class": "com.example.Handler"})
    with pytest.raises(OptionError, match="only Java clients have; use OAUTHBEARER and a function"):
        translate({"sasl.mechanism": "AWS_MSK_IAM"})


def test_a_kerberos_login_becomes_keytab_and_principal() -> None:
    settings, notes = translate(
        {
            "sasl.mechanism": "GSSAPI",
            "sasl.kerberos.service.name": "kafka",
            "sasl.kerberos.kinit.cmd": "/usr/bin/kinit",
            "sasl.jaas.config": f'{KERBEROS} required useKeyTab=true storeKey=true keyTab="/k.keytab" principal="u@R";',
        }
    )
    assert settings == {
        "sasl.mechanism": "GSSAPI",
        "sasl.kerberos.service.name": "kafka",
        "sasl.kerberos.keytab": "/k.keytab",
        "sasl.kerberos.principal": "u@R",
    }
    assert notes == [
        "kafka.sasl.kerberos.kinit.cmd has no effect: kinit is found on the PATH; a whole command line would be used"
    ]


def test_a_kerberos_ticket_cache_is_used_as_it_is() -> None:
    settings, notes = translate({"sasl.jaas.config": f"{KERBEROS} required useTicketCache=true serviceName=kafka;"})
    assert settings["sasl.kerberos.min.time.before.relogin"] == "0"
    assert settings["sasl.kerberos.service.name"] == "kafka"
    assert notes == ["kafka.sasl.jaas.config uses the ticket cache: renew the ticket outside"]
    with pytest.raises(OptionError, match="lacks keyTab"):
        translate({"sasl.jaas.config": f"{KERBEROS} required;"})


@pytest.mark.parametrize(
    "jaas",
    ["", "hunter2", f"{PLAIN} required password", f'{PLAIN} required password="hunter2', f"{PLAIN} password=hunter2;",
     f"{PLAIN} perhaps password=hunter2;",
     f"{PLAIN} required password==hunter2;", f"{PLAIN} required password=a; {PLAIN} required password=hunter2;"],
)  # fmt: skip
def test_a_damaged_jaas_text_is_refused_without_being_shown(jaas: str) -> None:
    with pytest.raises(OptionError, match="is not one login module as in") as caught:
        parse_jaas(jaas)
    assert "hunter2" not in str(caught.value)


def test_an_unknown_login_module_is_named_and_that_of_msk_has_an_equal() -> None:
    with pytest.raises(OptionError, match="names 'LdapLoginModule'; it must be PlainLoginModule"):
        translate({"sasl.jaas.config": "com.example.LdapLoginModule required;"})
    with pytest.raises(OptionError, match=r"kafka\.oauth_cb=package\.module:function"):
        translate({"sasl.jaas.config": "software.amazon.msk.auth.iam.IAMLoginModule required;"})


def test_a_backslash_in_a_jaas_text_stands_before_the_character_it_protects() -> None:
    assert parse_jaas(r'a.B required x="\\ \" \;" y="";') == ("B", {"x": '\\ " ;', "y": ""})
    for other in (r"\t", r"\101"):  # to Java a tab and an A
        with pytest.raises(OptionError, match="is not one login module"):
            parse_jaas(f'a.B required x="{other}";')


# ---- TLS


def test_pem_stores_become_pem_settings() -> None:
    settings, notes = translate(
        {
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": "/tls/ca.pem",
            "ssl.truststore.password": "unused",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": "/tls/client.pem",
            "ssl.keystore.password": "unused",
            "ssl.key.password": "p",
        }
    )
    assert settings == {
        "ssl.ca.location": "/tls/ca.pem",
        "ssl.key.location": "/tls/client.pem",
        "ssl.certificate.location": "/tls/client.pem",
        "ssl.key.password": "p",
    }
    assert notes == []


def test_pem_texts_become_pem_texts() -> None:
    settings, _ = translate(
        {
            "ssl.truststore.type": "PEM",
            "ssl.truststore.certificates": "CA",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.certificate.chain": "CHAIN",
            "ssl.keystore.key": "KEY",
        }
    )
    assert settings == {"ssl.ca.pem": "CA", "ssl.certificate.pem": "CHAIN", "ssl.key.pem": "KEY"}


@pytest.mark.parametrize("said", [{"ssl.keystore.type": "PKCS12"}, {}])
def test_a_pkcs12_key_store_passes(said: dict[str, str]) -> None:
    store = {"ssl.keystore.location": "/tls/client.p12", "ssl.keystore.password": "p"}
    assert translate(store | said) == (store, [])


def test_a_java_key_store_is_refused_with_the_command_that_converts_it() -> None:
    for said in ({"ssl.keystore.type": "JKS"}, {}):
        with pytest.raises(OptionError) as caught:
            translate({"ssl.keystore.location": "/my tls/client.jks", "ssl.keystore.password": "hunter2"} | said)
        assert (
            "keytool -importkeystore -srckeystore '/my tls/client.jks' -destkeystore '/my tls/client.p12' "
            "-deststoretype PKCS12   then set kafka.ssl.keystore.location to the .p12 file"
        ) in str(caught.value)
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "said", "command"),
    [
        (
            "/t.jks",
            "",
            (
                "keytool -importkeystore -srckeystore /t.jks -destkeystore /t.p12 -deststoretype PKCS12 "
                "&& openssl pkcs12 -in /t.p12 -nokeys -out /t.pem"
            ),
        ),
        ("/t.p12", "PKCS12", "openssl pkcs12 -in /t.p12 -nokeys -out /t.pem"),
        ("/trust", "", "keytool -importkeystore -srckeystore /trust -destkeystore /trust.p12"),
    ],
)
def test_other_trust_stores_are_refused_with_the_command_that_converts_them(path: str, said: str, command: str) -> None:
    given = {"ssl.truststore.location": path, "ssl.truststore.password": "hunter2"}
    with pytest.raises(OptionError) as caught:
        translate(given | ({"ssl.truststore.type": said} if said else {}))
    assert f"Convert it with: {command}" in str(caught.value)
    assert "hunter2" not in str(caught.value)


# ---- secrets


@pytest.mark.parametrize(
    "name",
    ["sasl.password", "kafka.SASL.Password", "ssl.key.password", "ssl.key.pem", "sasl.jaas.config", "ssl.ca.pem",
     "sasl.oauthbearer.client.secret", "sasl.oauthbearer.config", "ssl.keystore.password", "my.token",
     "sasl.oauthbearer.assertion.private.key.passphrase"],
)  # fmt: skip
def test_G9_these_are_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["bootstrap.servers", "group.id", "sasl.username", "socket.keepalive.enable", "debug"])
def test_G9_these_are_none(name: str) -> None:
    assert not is_secret(name)
