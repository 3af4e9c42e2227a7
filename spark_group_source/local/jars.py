"""Java, and the jars that Spark and the local broker need.

Runs in: tests, the demo, benchmarks, the command line. Deliberately absent: downloads of Python packages, and
``~/.m2`` and ``~/.ivy2``, whose content depends on other builds.

The jars come from Maven Central through the Ivy that ships with PySpark, into the user's cache folder, once for each
set of coordinates: the command line, notebooks, the demo and the tests share them. For a mirror set
``SPARK_GROUP_IVY_SETTINGS`` to an Ivy settings file. A download reports on stderr what it loads, from where and to
which folder; a log line would be invisible in a script or a notebook that has not configured logging.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import quoteattr

from spark_group_source import compatibility
from spark_group_source.errors import SetupError

JAVA_MIN = 17
"""Required by Spark 4 and Kafka 4."""

RESOLVE_S = 600
"""Bound of one download of a set, and of waiting for another process that downloads one."""

PROGRESS_S = 5
"""Interval of the lines that report how much has been downloaded."""

JAVA_VERSION_S = 30
"""Bound of ``java -version``; a busy machine needs seconds."""

SCALA = "2.13"
KAFKA_VERSION = "4.2.1"
KAFKA_COORDINATES = (
    f"org.apache.kafka:kafka_{SCALA}:{KAFKA_VERSION}",
    "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4",  # Kafka logs through SLF4J 1.7 and brings no backend
)
SPARKS_JARS = (
    "at.yawk.lz4:lz4-java",
    "com.fasterxml.jackson.core:jackson-annotations",
    "com.fasterxml.jackson.core:jackson-core",
    "com.fasterxml.jackson.core:jackson-databind",
    "com.github.luben:zstd-jni",
    "com.google.code.findbugs:jsr305",
    "commons-pool:commons-pool",
    "io.airlift:aircompressor",
    "org.apache.hadoop:hadoop-client-api",
    "org.apache.hadoop:hadoop-client-runtime",
    "org.apache.logging.log4j:log4j-api",
    "org.apache.logging.log4j:log4j-core",
    "org.apache.logging.log4j:log4j-slf4j2-impl",
    "org.apache.parquet:parquet-column",
    "org.apache.parquet:parquet-common",
    "org.apache.parquet:parquet-encoding",
    "org.apache.parquet:parquet-format-structures",
    "org.apache.parquet:parquet-hadoop",
    "org.apache.parquet:parquet-jackson",
    "org.locationtech.jts:jts-core",
    "org.roaringbitmap:RoaringBitmap",
    "org.scala-lang:scala-library",
    "org.scala-lang.modules:scala-parallel-collections",
    "org.slf4j:slf4j-api",
    "org.xerial.snappy:snappy-java",
)
"""Dependencies that are not downloaded if Spark contains them: 82 of the 95 MB of Delta Lake."""

_SETTINGS = """<ivysettings>
  <settings defaultResolver="central"/>
  <timeout-constraints>
    <timeout-constraint name="bounded" connectionTimeout="15000" readTimeout="60000"/>
  </timeout-constraints>
  <resolvers>
    <ibiblio name="central" m2compatible="true" usepoms="true" timeoutConstraint="bounded"/>
  </resolvers>
</ivysettings>
"""


def cache_dir() -> Path:
    """The project's folder in the user's cache: ``$XDG_CACHE_HOME`` or ``~/.cache``; not created here."""
    return user_folder("XDG_CACHE_HOME", ".cache")


def user_folder(variable: str, default: str) -> Path:
    """The project's folder in the one that an XDG variable names, by default in one of the home folder. A relative path
    is ignored, as XDG's specification demands: the processes that use the folder have different working folders."""
    named = Path(os.environ.get(variable, ""))
    return (named if named.is_absolute() else Path.home() / default) / "spark-group-source"


def java_path() -> Path:
    """The ``java`` that Spark uses: of ``JAVA_HOME`` if that is set, else the first one in ``PATH``.

    Raises:
        SetupError: it does not exist, does not run, or is older than :data:`JAVA_MIN`.
    """
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=str(Path(home) / "bin") if home else None)
    if found is None:
        where = f"JAVA_HOME={home}" if home else "PATH"
        raise SetupError(f"Java {JAVA_MIN} or newer is needed, and there is no java in {where}")
    try:
        shown = subprocess.run(
            [found, "-version"], capture_output=True, text=True, timeout=JAVA_VERSION_S, check=True
        ).stderr
    except (OSError, subprocess.SubprocessError) as exc:
        raise SetupError(f"Java {JAVA_MIN} or newer is needed, and {found} does not run: {exc}") from exc
    # "17.0.15", "21-ea", and "1.8.0_412" for Java 8
    match = re.search(r'version "(?:1\.)?(\d+)', shown)
    if match is None or int(match[1]) < JAVA_MIN:
        version = match[1] if match else (shown.splitlines() or ["unknown"])[0]
        raise SetupError(f"Java {JAVA_MIN} or newer is needed, and {found} is Java {version}")
    return Path(found)


def resolve(coordinates: Sequence[str], exclude: Sequence[str] = (), *, mb: int) -> list[Path]:
    """The jars of the coordinates and their runtime dependencies, downloaded by the first call.

    Args:
        coordinates: ``group:artifact:version`` each.
        mb: size of the jars in MB, for the lines that report a download.
        exclude: ``group:artifact`` excluded from *transitive* dependencies.

    Returns:
        The jars, sorted. They are in the cache folder: do not change them.

    Raises:
        SetupError: no Java, PySpark without Ivy, or a failed download, with Ivy's error.
    """
    digest = hashlib.sha256(repr((coordinates, exclude)).encode()).hexdigest()[:8]
    home = cache_dir()
    _, artifact, version = coordinates[0].split(":")
    target = home / f"{artifact}-{version}-{digest}"
    if not target.is_dir():
        java = java_path()
        home.mkdir(parents=True, exist_ok=True)
        with locked(home / "resolve.lock", RESOLVE_S):
            if not target.is_dir():  # another process may have downloaded it
                _download(java, coordinates, exclude, target, mb)
    return sorted(target.glob("*.jar"))


def delta_jars() -> list[Path]:
    """The jars of Delta Lake, for ``spark.jars``, without those that Spark contains.

    There are none if Spark contains Delta Lake, as on many platforms, or if Delta Lake has no release for it.
    """
    if contains_delta() or not compatibility.has_delta_release():
        return []
    return _without_sparks(resolve((compatibility.delta_coordinate(),), exclude=_sparks_modules(), mb=13))


def avro_jars() -> list[Path]:
    """The jar of Spark's Avro functions, for ``spark.jars``. There is none if Spark contains it."""
    if any(_spark_jars().glob("spark-avro*.jar")):
        return []
    return _without_sparks(resolve((compatibility.avro_coordinate(),), exclude=_sparks_modules(), mb=1))


def contains_delta() -> bool:
    """Whether Delta Lake is among Spark's own jars."""
    return any(_spark_jars().glob("delta-spark*.jar"))


def kafka_jars() -> list[Path]:
    """The class path of a Kafka broker."""
    return resolve(KAFKA_COORDINATES, mb=45)


def _spark_jars() -> Path:
    spec = importlib.util.find_spec("pyspark")  # find_spec, because importing takes a second
    for place in (spec.submodule_search_locations or []) if spec else []:
        jars = Path(place) / "jars"
        if jars.is_dir():
            return jars
    raise SetupError(
        "PySpark with its jars is not installed in this Python. Install it with "
        "`pip install 'pyspark[sql]==4.2.0' 'delta-spark==4.4.0'`"
    )


def _sparks_artifacts() -> set[str]:
    return {_artifact(jar.stem) for jar in _spark_jars().glob("*.jar")}


def _sparks_modules() -> tuple[str, ...]:
    """The modules of :data:`SPARKS_JARS` that this Spark contains."""
    sparks = _sparks_artifacts()
    return tuple(module for module in SPARKS_JARS if module.partition(":")[2] in sparks)


def _without_sparks(jars: Sequence[Path]) -> list[Path]:
    """Leave out artifacts that Spark contains: a second version on the class path is ignored at best."""
    sparks = _sparks_artifacts()
    return [jar for jar in jars if _artifact(jar.stem.split("_", 1)[1]) not in sparks]


def _artifact(stem: str) -> str:
    """``"jackson-core-2.21.2"`` -> ``"jackson-core"``."""
    return re.split(r"-\d", stem, maxsplit=1)[0]


def _ivy_jar() -> Path:
    for jar in sorted(_spark_jars().glob("ivy-*.jar")):
        return jar
    raise SetupError(f"{_spark_jars()} has no ivy-*.jar, which is needed to download jars; reinstall pyspark")


def _download(java: Path, coordinates: Sequence[str], exclude: Sequence[str], target: Path, mb: int) -> None:
    home, names = target.parent, ", ".join(coordinates)
    place = os.environ.get("SPARK_GROUP_IVY_SETTINGS")
    origin = f"the repositories of {place}" if place else "Maven Central"
    _report(f"downloading {names} with dependencies, {mb} MB, from {origin} to {target}")
    with tempfile.TemporaryDirectory(dir=home, prefix=".resolve-") as scratch_name:
        scratch = Path(scratch_name)
        settings = Path(place or scratch / "ivysettings.xml")
        if settings.parent == scratch:
            settings.write_text(_SETTINGS, encoding="utf-8")
        module = scratch / "ivy.xml"
        module.write_text(_ivy_module(coordinates, exclude), encoding="utf-8")
        jars = scratch / "jars"
        jars.mkdir()
        command = [str(java), "-Xmx256m", "-cp", str(_ivy_jar()), "org.apache.ivy.Main", "-warn"]
        command += ["-settings", str(settings), "-cache", str(home / "ivy"), "-ivy", str(module)]
        # "bundle" is the type of OSGi jars such as Snappy's, which are silently left out otherwise
        command += ["-types", "jar", "bundle"]
        command += ["-retrieve", f"{jars}/[organisation]_[artifact]-[revision](-[classifier]).[ext]"]
        code, output = _run_ivy(command, names, home / "ivy", mb)
        missing = [c for c in coordinates if not (jars / "{}_{}-{}.jar".format(*c.split(":"))).is_file()]
        if code != 0 or missing:
            raise SetupError(
                f"cannot download {', '.join(missing) or names} from {origin} ({_ivy_reason(output)}); "
                "check the network, or name a mirror's Ivy settings file in SPARK_GROUP_IVY_SETTINGS"
            )
        jars.rename(target)


def _run_ivy(command: Sequence[str], names: str, cache: Path, mb: int) -> tuple[int, str]:
    """Run Ivy, report every few seconds how much its cache has grown, and return its exit code and output.

    Ivy first loads the descriptors of all dependencies, one after the other, and then the jars.
    """
    started, before, descriptors = time.monotonic(), _size_mb(cache), _descriptors(cache)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ivy:
        while True:
            waited_s = time.monotonic() - started
            try:
                output, _ = ivy.communicate(timeout=PROGRESS_S)
                return ivy.returncode, output
            except subprocess.TimeoutExpired as exc:
                if waited_s > RESOLVE_S:
                    ivy.kill()
                    raise SetupError(f"downloading {names} took longer than {RESOLVE_S} s; try again") from exc
            loaded, read = _size_mb(cache) - before, _descriptors(cache) - descriptors
            done = f"{loaded:.0f} of {mb} MB" if loaded else f"resolving dependencies: {read} descriptors"
            _report(f"  {done} after {time.monotonic() - started:.0f} s")


def _descriptors(folder: Path) -> int:
    """The number of descriptors of dependencies in Ivy's cache."""
    return sum(1 for _ in folder.rglob("*.xml.original"))


def _size_mb(folder: Path) -> float:
    """The size of the jars in Ivy's cache, with those that are being downloaded."""
    found = 0
    for path in folder.rglob("*.jar*"):
        with contextlib.suppress(FileNotFoundError):  # Ivy has renamed it
            found += path.stat().st_size
    return found / 1e6


def _report(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _ivy_module(coordinates: Sequence[str], exclude: Sequence[str]) -> str:
    lines = ['<ivy-module version="2.0">', '  <info organisation="spark-group-source" module="jars"/>']
    lines += ['  <configurations><conf name="default"/></configurations>', "  <dependencies>"]
    for coordinate in coordinates:
        group, artifact, version = map(quoteattr, coordinate.split(":"))
        lines.append(f'    <dependency org={group} name={artifact} rev={version} conf="default->default">')
        # An exclusion of a requested module applies to transitive dependencies only.
        for org, module in (map(quoteattr, other.split(":")) for other in exclude):
            if (org, module) != (group, artifact):
                lines.append(f"      <exclude org={org} module={module}/>")
        lines.append("    </dependency>")
    return "\n".join([*lines, "  </dependencies>", "</ivy-module>"])


def _ivy_reason(output: str) -> str:
    for pattern in (
        r"(UnknownHost\S*|Connect\S*Exception|SSL\S*Exception)[^\n]*",
        r"not found[^\n]*",
        r"UNRESOLVED[^\n]*",
    ):
        match = re.search(pattern, output)
        if match:
            return match[0].strip()
    lines = [line.strip(" \t:") for line in output.splitlines() if line.strip(" \t:")]
    return lines[-1] if lines else "no output"


@contextlib.contextmanager
def locked(path: Path, wait_s: float) -> Iterator[None]:
    """Hold an exclusive lock between processes on a file, which is created; it ends with the process at the latest.

    Raises:
        SetupError: another process held it for ``wait_s``.
    """
    deadline = time.monotonic() + wait_s
    pause = threading.Event()
    with open(path, "ab") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as exc:
                if time.monotonic() >= deadline:
                    raise SetupError(
                        f"another process has held {path} for {wait_s:.0f} s; stop it if it hangs"
                    ) from exc
                pause.wait(0.1)  # flock has no timeout of its own
        yield  # closing the file releases the lock
