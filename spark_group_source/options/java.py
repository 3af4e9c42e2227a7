"""Translation of Java's Kafka client settings into those of librdkafka.

Runs in: every process. Deliberately absent: reading or converting key stores (the errors have the commands), and names
that only Java clients know: librdkafka refuses them at ``load()`` (``kafka.environment``). Settings that work with
Spark's Kafka connector (JAAS texts, ``ssl.truststore.*``, Java's names) are translated if librdkafka has an equivalent.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import Final

from spark_group_source.errors import OptionError

RENAMED: Final[Mapping[str, str]] = {
    "fetch.max.wait.ms": "fetch.wait.max.ms",
    "receive.buffer.bytes": "socket.receive.buffer.bytes",
    "send.buffer.bytes": "socket.send.buffer.bytes",
    "request.timeout.ms": "socket.timeout.ms",
    # Java's refresh interval; librdkafka derives its own metadata.max.age.ms from this one (three times as long).
    "metadata.max.age.ms": "topic.metadata.refresh.interval.ms",
    "sasl.mechanisms": "sasl.mechanism",
    "sasl.oauthbearer.client.credentials.client.id": "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.credentials.client.secret": "sasl.oauthbearer.client.secret",
}
ASSIGNORS: Final[Mapping[str, str]] = {
    "RangeAssignor": "range",
    "RoundRobinAssignor": "roundrobin",
    "CooperativeStickyAssignor": "cooperative-sticky",
}
"""librdkafka's assignors by the name of Java's class, without its package."""
_OAUTH_HANDLER: Final = "OAuthBearerLoginCallbackHandler"
_MSK: Final = (
    "use OAUTHBEARER with a function that signs tokens, kafka.oauth_cb=package.module:function (docs/security.md has "
    "an example), or SCRAM-SHA-512"
)
STORE_TYPES: Final[Mapping[str, str]] = {
    **dict.fromkeys((".pem", ".crt", ".cer", ".ca"), "PEM"),
    **dict.fromkeys((".p12", ".pfx"), "PKCS12"),
    **dict.fromkeys((".jks", ".keystore", ".truststore"), "JKS"),
}
"""Formats of stores by file extension."""
_VALUE: Final = r"""(?:"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'|[^\s=;"']++)"""
_JAAS_OPTION: Final = re.compile(rf"""([^\s=;"']++)\s*+=\s*+({_VALUE})\s*+""", re.DOTALL)
_JAAS: Final = re.compile(
    rf"\s*+([^\s=;\"']++)\s++(?:required|requisite|sufficient|optional)(?![^\s;])\s*+((?:{_JAAS_OPTION.pattern})*+);?\s*+",
    re.DOTALL | re.IGNORECASE,
)


def translate(given: Mapping[str, str]) -> dict[str, str]:
    """Translate Java's settings; other settings are returned unchanged.

    Args:
        given: names without the prefix ``kafka.``, in lower case.

    Raises:
        OptionError: a setting cannot be translated safely, or contradicts another. The message has no secret; for a
            Java key store it has the command that converts the store.
    """
    settings = dict(given)
    _rename(settings)
    _assignors(settings)
    _truststore(settings)
    _keystore(settings)
    _sasl(settings)
    if settings.get("ssl.endpoint.identification.algorithm", "-").strip() == "":
        settings["ssl.endpoint.identification.algorithm"] = "none"
    return settings


def _put(settings: dict[str, str], name: str, value: str, origin: str) -> None:
    """Set the translation of Java's setting ``origin``; refuse it if the setting already has another value."""
    if settings.setdefault(name, value) != value:
        raise _refused(origin, f"contradicts kafka.{name}, which means the same; set only one of them")


def _refused(name: str, why: str) -> OptionError:
    return OptionError(f"option 'kafka.{name}' {why}", option=f"kafka.{name}")


def _rename(settings: dict[str, str]) -> None:
    # metadata.max.age.ms exists in both: it is librdkafka's if librdkafka's other refresh setting is given too.
    native = {"metadata.max.age.ms"} if "topic.metadata.refresh.interval.ms" in settings else set()
    for java in RENAMED.keys() & settings.keys() - native:
        _put(settings, RENAMED[java], settings.pop(java), java)


def _assignors(settings: dict[str, str]) -> None:
    given = settings.get("partition.assignment.strategy", "")
    names = [name.strip().rpartition(".")[2] for name in given.split(",")]
    if all(names):  # otherwise librdkafka refuses it
        settings["partition.assignment.strategy"] = ",".join(dict.fromkeys(ASSIGNORS.get(n, n) for n in names))


# ---- TLS


def _store_type(settings: dict[str, str], store: str) -> str:
    """The format of a store: its setting, else by file extension, else empty."""
    extension = PurePath(settings.get(f"ssl.{store}.location", "")).suffix.lower()
    return settings.pop(f"ssl.{store}.type", STORE_TYPES.get(extension, "")).strip().upper()


def _converted(path: str, suffix: str) -> str:
    """The name of a converted store, which is another one than that of the store."""
    target = str(PurePath(path).with_suffix(suffix))
    return target if target != path else path + suffix


def _to_pkcs12(path: str) -> str:
    source, target = shlex.quote(path), shlex.quote(_converted(path, ".p12"))
    return f"keytool -importkeystore -srckeystore {source} -destkeystore {target} -deststoretype PKCS12"


def _to_pem(path: str) -> str:
    source, target = shlex.quote(path), shlex.quote(_converted(path, ".pem"))
    return f"openssl pkcs12 -in {source} -nokeys -out {target}"


def _truststore(settings: dict[str, str]) -> None:
    kind = _store_type(settings, "truststore")
    settings.pop("ssl.truststore.password", None)  # only the formats that are refused below have one
    if (text := settings.pop("ssl.truststore.certificates", None)) is not None:
        _put(settings, "ssl.ca.pem", text, "ssl.truststore.certificates")
    path = settings.pop("ssl.truststore.location", None)
    if path is None:
        return
    if kind != "PEM":
        convert = _to_pem(path)
        if kind != "PKCS12":
            convert = f"{_to_pkcs12(path)} && {_to_pem(_converted(path, '.p12'))}"
        raise _refused(
            "ssl.truststore.location",
            f"is {path!r}, a {kind or 'JKS'} store; trusted certificates must be in PEM format. Convert it with "
            f"`{convert}`, then set "
            "kafka.ssl.truststore.location to that .pem file and kafka.ssl.truststore.type to PEM",
        )
    _put(settings, "ssl.ca.location", path, "ssl.truststore.location")


def _keystore(settings: dict[str, str]) -> None:
    for java, name in (("certificate.chain", "ssl.certificate.pem"), ("key", "ssl.key.pem")):
        if (text := settings.pop(f"ssl.keystore.{java}", None)) is not None:
            _put(settings, name, text, f"ssl.keystore.{java}")
    kind = _store_type(settings, "keystore")
    path = settings.get("ssl.keystore.location")
    if path is None or kind in ("", "PKCS12"):
        return
    if kind != "PEM":
        raise _refused(
            "ssl.keystore.location",
            f"is {path!r}, a {kind} store; it must be PKCS12 or PEM. Convert it with `{_to_pkcs12(path)}`, then set "
            "kafka.ssl.keystore.location to that .p12 file and kafka.ssl.keystore.type to PKCS12",
        )
    del settings["ssl.keystore.location"]  # one file with the key and its chain
    settings.pop("ssl.keystore.password", None)
    for name in ("ssl.key.location", "ssl.certificate.location"):
        _put(settings, name, path, "ssl.keystore.location")


# ---- SASL


def _sasl(settings: dict[str, str]) -> None:
    if settings.get("sasl.mechanism", "").strip().upper() == "AWS_MSK_IAM":
        raise _refused("sasl.mechanism", f"is 'AWS_MSK_IAM', which only Java clients support; {_MSK}")
    handler = settings.pop("sasl.login.callback.handler.class", _OAUTH_HANDLER)
    if handler.rpartition(".")[2] != _OAUTH_HANDLER:
        raise _refused(
            "sasl.login.callback.handler.class",
            f"is {handler!r}, a Java class that cannot run here; only Kafka's {_OAUTH_HANDLER} has an equivalent",
        )
    if " " not in settings.get("sasl.kerberos.kinit.cmd", "a command").strip():
        # In Java this is the program's name; in librdkafka it is a whole command line with a working default.
        del settings["sasl.kerberos.kinit.cmd"]
    text = settings.pop("sasl.jaas.config", None)
    if text is None:
        return
    module, login = parse_jaas(text)
    match module:
        case "PlainLoginModule" | "ScramLoginModule":
            found = _login_password(settings, module, login)
        case "OAuthBearerLoginModule":
            found = _login_oauth(settings, login)
        case "Krb5LoginModule":
            found = _login_kerberos(settings, login)
        case "IAMLoginModule":
            raise _refused("sasl.jaas.config", f"names {module!r}, which only Java clients support; {_MSK}")
        case _:
            modules = "PlainLoginModule, ScramLoginModule, OAuthBearerLoginModule or Krb5LoginModule"
            raise _refused("sasl.jaas.config", f"names {module!r}; it must be {modules}")
    for name, value in found.items():
        _put(settings, f"sasl.{name}", value, "sasl.jaas.config")


def parse_jaas(text: str) -> tuple[str, dict[str, str]]:
    """Return the login module's class name without its package, and its options.

    A backslash escapes the next character. An escaped letter or digit, which Java reads as a control character, is
    refused.

    Raises:
        OptionError: the text is not one module as in ``Module required name="value" …;``. The message does not show it.
    """
    whole = _JAAS.fullmatch(text)
    values = dict(_JAAS_OPTION.findall(whole[2])) if whole else {}
    quoted = {name for name, value in values.items() if value[0] in "\"'"}
    if whole is None or any(re.search(r"\\[a-zA-Z0-9]", values[name]) for name in quoted):
        raise _refused(
            "sasl.jaas.config",
            "is not one login module as in: "
            'org.apache.kafka.common.security.plain.PlainLoginModule required username="…" password="…";',
        )
    plain = {name: re.sub(r"\\(.)", r"\1", values[name][1:-1], flags=re.DOTALL) for name in quoted}
    return whole[1].rpartition(".")[2], values | plain


def _mechanism(settings: dict[str, str], module: str, prefix: str, default: str) -> str:
    found = settings.pop("sasl.mechanism", default).strip()
    if not found.upper().startswith(prefix):
        raise OptionError(
            f"option 'kafka.sasl.jaas.config' names {module}, but kafka.sasl.mechanism is {found or 'not set'}; it "
            f"must be {default or 'SCRAM-SHA-256 or SCRAM-SHA-512'}",
            option="kafka.sasl.mechanism",
        )
    return found


def _login_password(settings: dict[str, str], module: str, login: Mapping[str, str]) -> dict[str, str]:
    if login.get("tokenauth", "false").lower() == "true":
        raise _refused("sasl.jaas.config", "has tokenauth=true, but librdkafka does not support delegation tokens")
    plain = module == "PlainLoginModule"
    mechanism = _mechanism(settings, module, "PLAIN" if plain else "SCRAM-", "PLAIN" if plain else "")
    _require(login, "username", "password")
    return {"mechanism": mechanism, "username": login["username"], "password": login["password"]}


def _login_oauth(settings: dict[str, str], login: Mapping[str, str]) -> dict[str, str]:
    mechanism = _mechanism(settings, "OAuthBearerLoginModule", "OAUTHBEARER", "OAUTHBEARER")
    found = {"mechanism": mechanism, "oauthbearer.method": "oidc"}
    for java, name in (("clientId", "client.id"), ("clientSecret", "client.secret"), ("scope", "scope")):
        if java in login:
            found[f"oauthbearer.{name}"] = login[java]
        elif java != "scope" and not settings.keys() & {f"sasl.oauthbearer.{name}", "sasl.oauthbearer.grant.type"}:
            _require(login, java)
    extensions = {name: value for name, value in login.items() if name.startswith("extension_")}
    if extensions:
        pairs = (f"{name.removeprefix('extension_')}={value}" for name, value in extensions.items())
        found["oauthbearer.extensions"] = ",".join(pairs)
    return found


def _login_kerberos(settings: dict[str, str], login: Mapping[str, str]) -> dict[str, str]:
    found = {"mechanism": _mechanism(settings, "Krb5LoginModule", "GSSAPI", "GSSAPI")}
    for java, name in (("principal", "principal"), ("serviceName", "service.name"), ("keyTab", "keytab")):
        if java in login:
            found[f"kerberos.{name}"] = login[java]
    if "keyTab" not in login:
        if login.get("useTicketCache", "false").lower() != "true":
            _require(login, "keyTab")
        # Without a keytab librdkafka's kinit would fail: use the existing ticket, which is renewed elsewhere.
        found["kerberos.min.time.before.relogin"] = "0"
    return found


def _require(login: Mapping[str, str], *names: str) -> None:
    for name in names:
        if not login.get(name):
            raise _refused("sasl.jaas.config", f"has no {name}")
