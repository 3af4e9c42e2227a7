"""Kafka settings as Java clients write them, translated for the client library (librdkafka).

Runs in: every process. Deliberately absent: reading or converting key stores (the errors give the commands), and names
that only a Java client knows: librdkafka refuses them at ``load()`` (``kafka.settings``). Users bring what works with
Spark's own connector: JAAS texts, ``ssl.truststore.*``, Java's names. What has an equal is translated.
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
    # Java's "refresh at least this often"; the library's metadata.max.age.ms follows by itself at three times of it.
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
"""By Java's class, without its package."""
_OAUTH_HANDLER: Final = "OAuthBearerLoginCallbackHandler"
_MSK: Final = (
    "use OAUTHBEARER and a function that signs the token, kafka.oauth_cb=package.module:function (docs/security.md "
    "shows one), or SCRAM-SHA-512"
)
_PEM_ENDINGS: Final = frozenset({".pem", ".crt", ".cer", ".ca"})
_PKCS12_ENDINGS: Final = frozenset({".p12", ".pfx"})
_LOGIN_FLAGS: Final = frozenset({"required", "requisite", "sufficient", "optional"})
_JAAS_TOKEN: Final = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([^\s=;"']+)|([=;]))""", re.DOTALL)


class _Settings:
    """What is translated so far: no two sources may give one setting different values."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.left = dict(given)
        self.done: dict[str, str] = {}
        self.notes: list[str] = []

    def take(self, name: str) -> str | None:
        return self.left.pop(name, None)

    def put(self, name: str, value: str, origin: str) -> None:
        for other in (self.done.get(name), self.left.get(name)):
            if other not in (None, value):
                raise OptionError(
                    f"option 'kafka.{origin}' says something else than kafka.{name}; give one of them",
                    option=f"kafka.{origin}",
                )
        self.done[name] = value

    def note(self, name: str, why: str) -> None:
        self.notes.append(f"kafka.{name} has no effect: {why}")


def translate(given: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Translate Java's settings; all others pass unchanged.

    Args:
        given: names without the prefix ``kafka.``, in lower case.

    Returns:
        Settings for the client library, and a note for each that has no effect. No note holds a value.

    Raises:
        OptionError: a setting cannot be translated safely, or contradicts another. The message holds no secret; for a
            Java key store it holds the command that converts it.
    """
    settings = _Settings(given)
    _rename(settings)
    _assignors(settings)
    _truststore(settings)
    _keystore(settings)
    _sasl(settings)
    if settings.left.get("ssl.endpoint.identification.algorithm", "-").strip() == "":
        settings.left["ssl.endpoint.identification.algorithm"] = "none"
    return settings.left | settings.done, settings.notes


def _rename(settings: _Settings) -> None:
    # A library setting of the same name as Java's is meant as the library's once the other half stands beside it.
    native = {"metadata.max.age.ms"} if "topic.metadata.refresh.interval.ms" in settings.left else set()
    for java, name in RENAMED.items():
        if java in native or java not in settings.left:
            continue
        settings.put(name, settings.left.pop(java), java)


def _assignors(settings: _Settings) -> None:
    given = settings.left.get("partition.assignment.strategy", "")
    names = [name.strip().rpartition(".")[2] for name in given.split(",")]
    if all(names):  # else the library refuses it
        settings.left["partition.assignment.strategy"] = ",".join(dict.fromkeys(ASSIGNORS.get(n, n) for n in names))


# ---- TLS


def _kind(settings: _Settings, store: str, path: str) -> str:
    """The format of a store: as said, or by the file's ending, or "" when neither tells."""
    said = settings.take(f"ssl.{store}.type")
    if said is not None:
        return said.strip().upper()
    ending = PurePath(path).suffix.lower()
    if ending in _PEM_ENDINGS:
        return "PEM"
    if ending in _PKCS12_ENDINGS:
        return "PKCS12"
    return "JKS" if ending in (".jks", ".keystore", ".truststore") else ""


def _to_pkcs12(path: str) -> str:
    source, target = shlex.quote(path), shlex.quote(str(PurePath(path).with_suffix(".p12")))
    return f"keytool -importkeystore -srckeystore {source} -destkeystore {target} -deststoretype PKCS12"


def _to_pem(path: str) -> str:
    source, target = shlex.quote(path), shlex.quote(str(PurePath(path).with_suffix(".pem")))
    return f"openssl pkcs12 -in {source} -nokeys -out {target}"


def _truststore(settings: _Settings) -> None:
    path = settings.take("ssl.truststore.location")
    text = settings.take("ssl.truststore.certificates")
    kind = _kind(settings, "truststore", path or "")
    settings.take("ssl.truststore.password")  # guards only the forms that are refused below
    if text is not None:
        settings.put("ssl.ca.pem", text, "ssl.truststore.certificates")
    if path is None:
        return
    if kind == "PEM":
        settings.put("ssl.ca.location", path, "ssl.truststore.location")
        return
    convert = (
        _to_pem(path)
        if kind == "PKCS12"
        else f"{_to_pkcs12(path)} && {_to_pem(str(PurePath(path).with_suffix('.p12')))}"
    )
    raise OptionError(
        f"option 'kafka.ssl.truststore.location' is {path!r}, a {kind or 'JKS'} store; trusted certificates must be "
        f"PEM. Convert it with: {convert}   then set kafka.ssl.truststore.location to the .pem file and "
        "kafka.ssl.truststore.type to PEM",
        option="kafka.ssl.truststore.location",
    )


def _keystore(settings: _Settings) -> None:
    chain = settings.take("ssl.keystore.certificate.chain")
    if chain is not None:
        settings.put("ssl.certificate.pem", chain, "ssl.keystore.certificate.chain")
    key = settings.take("ssl.keystore.key")
    if key is not None:
        settings.put("ssl.key.pem", key, "ssl.keystore.key")
    path = settings.left.get("ssl.keystore.location")
    kind = _kind(settings, "keystore", path or "")
    if path is None:
        return
    if kind == "PEM":  # one file with the key and its chain
        del settings.left["ssl.keystore.location"]
        settings.take("ssl.keystore.password")
        settings.put("ssl.key.location", path, "ssl.keystore.location")
        settings.put("ssl.certificate.location", path, "ssl.keystore.location")
    elif kind not in ("", "PKCS12"):
        raise OptionError(
            f"option 'kafka.ssl.keystore.location' is {path!r}, a {kind} store; it must be PKCS12 or PEM. Convert it "
            f"with: {_to_pkcs12(path)}   then set kafka.ssl.keystore.location to the .p12 file and "
            "kafka.ssl.keystore.type to PKCS12",
            option="kafka.ssl.keystore.location",
        )


# ---- SASL


def _sasl(settings: _Settings) -> None:
    if settings.left.get("sasl.mechanism", "").strip().upper() == "AWS_MSK_IAM":
        raise OptionError(
            f"option 'kafka.sasl.mechanism' is 'AWS_MSK_IAM', which only Java clients have; {_MSK}",
            option="kafka.sasl.mechanism",
        )
    handler = settings.take("sasl.login.callback.handler.class")
    if handler is not None and handler.rpartition(".")[2] != _OAUTH_HANDLER:
        raise OptionError(
            f"option 'kafka.sasl.login.callback.handler.class' is {handler!r}, a Java class that cannot run here; only "
            f"Kafka's own {_OAUTH_HANDLER} has an equal",
            option="kafka.sasl.login.callback.handler.class",
        )
    kinit = settings.left.get("sasl.kerberos.kinit.cmd")
    if kinit is not None and " " not in kinit.strip():
        # Java wants the path of kinit, the library a whole command line.
        del settings.left["sasl.kerberos.kinit.cmd"]
        settings.note("sasl.kerberos.kinit.cmd", "kinit is found on the PATH; a whole command line would be used")
    jaas = settings.take("sasl.jaas.config")
    if jaas is not None:
        _login(settings, *parse_jaas(jaas))


def parse_jaas(text: str) -> tuple[str, dict[str, str]]:
    """The login module's class name without its package, and its options.

    Raises:
        OptionError: it is not one module as in ``Module required name="value" …;``. The message does not repeat it.
    """
    tokens: list[tuple[str, bool]] = []  # the text, and whether it is a "=" or ";" of the grammar
    at = 0
    while text[at:].strip():
        match = _JAAS_TOKEN.match(text, at)
        if match is None:
            raise _jaas_error()
        double, single, word, mark = match.groups()
        quoted = double if double is not None else single
        plain = _unescaped(quoted) if quoted is not None else word or mark
        tokens.append((plain, mark is not None))
        at = match.end()
    if tokens and tokens[-1] == (";", True):
        tokens.pop()
    if len(tokens) < 2 or tokens[1][0].lower() not in _LOGIN_FLAGS or len(tokens) % 3 != 2:
        raise _jaas_error()
    options: dict[str, str] = {}
    for (name, _), equals, (value, is_mark) in zip(tokens[2::3], tokens[3::3], tokens[4::3], strict=True):
        if equals != ("=", True) or is_mark:
            raise _jaas_error()
        options[name] = value
    return tokens[0][0].rpartition(".")[2], options


def _unescaped(quoted: str) -> str:
    """The text without the backslashes before quotes and backslashes. Java reads a backslash before a letter or a digit
    as another character: such a text is refused rather than misread."""
    if re.search(r"\\[a-zA-Z0-9]", quoted):
        raise _jaas_error()
    return re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL)


def _jaas_error() -> OptionError:
    return OptionError(
        "option 'kafka.sasl.jaas.config' is not one login module as in: "
        'org.apache.kafka.common.security.plain.PlainLoginModule required username="…" password="…";',
        option="kafka.sasl.jaas.config",
    )


def _login(settings: _Settings, module: str, jaas: dict[str, str]) -> None:
    match module:
        case "PlainLoginModule" | "ScramLoginModule":
            _login_password(settings, module, jaas)
        case "OAuthBearerLoginModule":
            _login_oauth(settings, jaas)
        case "Krb5LoginModule":
            _login_kerberos(settings, jaas)
        case "IAMLoginModule":
            raise OptionError(
                f"option 'kafka.sasl.jaas.config' names {module!r}, which only Java clients have; {_MSK}",
                option="kafka.sasl.jaas.config",
            )
        case _:
            raise OptionError(
                f"option 'kafka.sasl.jaas.config' names {module!r}; it must be PlainLoginModule, ScramLoginModule, "
                "OAuthBearerLoginModule or Krb5LoginModule",
                option="kafka.sasl.jaas.config",
            )


def _mechanism(settings: _Settings, module: str, prefix: str, default: str) -> None:
    found = settings.left.get("sasl.mechanism", settings.done.get("sasl.mechanism", default)).strip()
    if not found.upper().startswith(prefix):
        raise OptionError(
            f"option 'kafka.sasl.jaas.config' names {module}, but kafka.sasl.mechanism is {found or 'not set'}; it "
            f"must be {default or 'SCRAM-SHA-256 or SCRAM-SHA-512'}",
            option="kafka.sasl.mechanism",
        )
    settings.left.pop("sasl.mechanism", None)
    settings.done["sasl.mechanism"] = found


def _login_password(settings: _Settings, module: str, jaas: Mapping[str, str]) -> None:
    if jaas.get("tokenauth", "false").lower() == "true":
        raise OptionError(
            "option 'kafka.sasl.jaas.config' asks for tokenauth: delegation tokens are not supported by the client",
            option="kafka.sasl.jaas.config",
        )
    plain = module == "PlainLoginModule"
    _mechanism(settings, module, "PLAIN" if plain else "SCRAM-", "PLAIN" if plain else "")
    _need(jaas, "username", "password")
    settings.put("sasl.username", jaas["username"], "sasl.jaas.config")
    settings.put("sasl.password", jaas["password"], "sasl.jaas.config")


def _login_oauth(settings: _Settings, jaas: Mapping[str, str]) -> None:
    _mechanism(settings, "OAuthBearerLoginModule", "OAUTHBEARER", "OAUTHBEARER")
    settings.put("sasl.oauthbearer.method", "oidc", "sasl.jaas.config")
    known = {**settings.left, **settings.done}
    names = {"clientId": "client.id", "clientSecret": "client.secret", "scope": "scope"}
    for java, name in names.items():
        if java in jaas:
            settings.put(f"sasl.oauthbearer.{name}", jaas[java], "sasl.jaas.config")
        elif java != "scope" and f"sasl.oauthbearer.{name}" not in known and "sasl.oauthbearer.grant.type" not in known:
            _need(jaas, java)
    extensions = [
        f"{name.removeprefix('extension_')}={value}" for name, value in jaas.items() if name.startswith("extension_")
    ]
    if extensions:
        settings.put("sasl.oauthbearer.extensions", ",".join(extensions), "sasl.jaas.config")


def _login_kerberos(settings: _Settings, jaas: Mapping[str, str]) -> None:
    _mechanism(settings, "Krb5LoginModule", "GSSAPI", "GSSAPI")
    if "principal" in jaas:
        settings.put("sasl.kerberos.principal", jaas["principal"], "sasl.jaas.config")
    if "serviceName" in jaas:
        settings.put("sasl.kerberos.service.name", jaas["serviceName"], "sasl.jaas.config")
    if "keyTab" in jaas:
        settings.put("sasl.kerberos.keytab", jaas["keyTab"], "sasl.jaas.config")
    elif jaas.get("useTicketCache", "false").lower() == "true":
        # Without a keytab the library's kinit could only fail: take the ticket as it is.
        settings.put("sasl.kerberos.min.time.before.relogin", "0", "sasl.jaas.config")
        settings.notes.append("kafka.sasl.jaas.config uses the ticket cache: renew the ticket outside")
    else:
        _need(jaas, "keyTab")


def _need(jaas: Mapping[str, str], *names: str) -> None:
    for name in names:
        if not jaas.get(name):
            raise OptionError(f"option 'kafka.sasl.jaas.config' lacks {name}", option="kafka.sasl.jaas.config")
