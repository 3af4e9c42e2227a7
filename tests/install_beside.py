"""What ``pip install spark-group-source`` changes beside a Spark: ``python -m tests.install_beside``. Needs a registry.

pip resolves the package together with the exact versions that a platform has. If it can, all of them satisfy the
package, and pip leaves a satisfied version alone. Nothing is installed.

    python -m tests.install_beside                    the platforms below
    python -m tests.install_beside --python PATH ...  the installed packages of these Pythons
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SPARKS_OWN = ("pyspark", "py4j", "pandas", "pyarrow", "numpy")
RESOLVE_S = 600

PLATFORMS: dict[str, dict[str, str]] = {
    "Spark 4.0, oldest packages": {"pyspark": "4.0.0", "pandas": "2.2.0", "pyarrow": "19.0.1", "numpy": "1.26.4"},
    "Databricks 17.3 (Spark 4.0)": {"pyspark": "4.0.1", "pandas": "2.2.3", "pyarrow": "19.0.1", "numpy": "2.1.3"},
    "Spark 4.1": {"pyspark": "4.1.1", "pandas": "2.3.3", "pyarrow": "21.0.0", "numpy": "2.2.6"},
    "Spark 4.2": {"pyspark": "4.2.0", "pandas": "2.3.3", "pyarrow": "26.0.1", "numpy": "2.4.6"},
    "Spark 4.3": {"pyspark": "4.3.0", "pandas": "2.3.3", "pyarrow": "26.0.1", "numpy": "2.4.6"},
}
"""Exact versions by platform."""


def pip(python: str, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [python, "-m", "pip", *words, "--disable-pip-version-check"]
    return subprocess.run(command, capture_output=True, text=True, timeout=RESOLVE_S, check=False)


def would_install(python: str, *words: str) -> dict[str, str]:
    """The versions that ``pip install`` would install, by package.

    Raises:
        RuntimeError: pip finds no versions that fit together.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        ended = pip(python, "install", "--dry-run", "--quiet", "--report", str(report), *words)
        if ended.returncode:
            raise RuntimeError(ended.stderr.strip())
        found: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return {one["metadata"]["name"].lower().replace("_", "-"): one["metadata"]["version"] for one in found}


def changes_on(platform: dict[str, str], package: str) -> list[str]:
    """What differs from the platform's versions; empty: nothing."""
    # Without Spark itself: pip would download 400 MB of each to read its metadata. Nothing may require it.
    pins = [f"{name}=={version}" for name, version in platform.items() if name != "pyspark"]
    try:
        found = would_install(sys.executable, "--ignore-installed", package, *pins)
    except RuntimeError as exc:
        return str(exc).splitlines()
    required = [f"{name} {found[name]} is required" for name in ("pyspark", "py4j") if name in found]
    return required + [f"{n} {version}" for n, version in platform.items() if found.get(n, version) != version]


def changes_in(python: str, package: str) -> list[str]:
    """The packages of Spark that pip would replace in an environment. A missing one is no change."""
    listed = pip(python, "list", "--format", "json")
    there = {one["name"].lower(): one["version"] for one in json.loads(listed.stdout)}
    try:
        found = would_install(python, package)
    except RuntimeError as exc:
        return str(exc).splitlines()
    return [f"{n} {there[n]} -> {found[n]}" for n in SPARKS_OWN if n in there and found.get(n, there[n]) != there[n]]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="What pip install spark-group-source changes beside a Spark.")
    parser.add_argument("--python", nargs="+", default=[], help="Pythons with a Spark; by default a list of platforms")
    parser.add_argument("--package", default=str(ROOT), help="a wheel, or the folder of a checkout (default: this one)")
    options = parser.parse_args(arguments)
    found = {name: changes_in(name, options.package) for name in options.python} or {
        f"{name}: {' '.join(map(' '.join, versions.items()))}": changes_on(versions, options.package)
        for name, versions in PLATFORMS.items()
    }
    for name, changes in found.items():
        print(f"{name}: {'; '.join(changes) or 'no change'}")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
