"""The files of ``conf/deploy``: linters and schemas accept them, and their commands and options are today's.

They run nowhere in these tests: there is neither Docker, Kubernetes nor Databricks here.
"""

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

from spark_group_source import __version__, compatibility
from spark_group_source.cli.app import app
from spark_group_source.cli.common import settings_in
from spark_group_source.options.table import Options

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "conf" / "deploy"
SPARK = f"{compatibility.SPARK}.0"
LINT_S = 300
STYLE = YamlLintConfig("{extends: default, rules: {line-length: {max: 120}, document-start: disable}}")


def only(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has no other properties, and must have those whose name ends in ``_``."""
    required = [name.removesuffix("_") for name in properties if name.endswith("_")]
    known = {name.removesuffix("_"): schema for name, schema in properties.items()}
    return {"type": "object", "properties": known, "required": required, "additionalProperties": False}


def array_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1}


TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
NUMBER: dict[str, Any] = {"type": "integer", "minimum": 1}
TEXTS: dict[str, Any] = {"type": "object", "additionalProperties": TEXT}

SELECTOR = only(matchLabels_=TEXTS)
NETWORK_POLICY = only(
    apiVersion_={"const": "networking.k8s.io/v1"},
    kind_={"const": "NetworkPolicy"},
    metadata_=only(name_=TEXT),
    spec_=only(
        podSelector_=SELECTOR,
        policyTypes_=array_of({"enum": ["Ingress", "Egress"]}),
        ingress=array_of(only(from_=array_of(only(podSelector_=SELECTOR)), ports=array_of(only(port_=NUMBER)))),
    ),
)
"""The part of Kubernetes' API that the files use."""

BUNDLE = only(
    bundle_=only(name_=TEXT),
    variables={"type": "object", "additionalProperties": only(description_=TEXT)},
    resources_=only(
        jobs_={
            "type": "object",
            "additionalProperties": only(
                name_=TEXT,
                max_concurrent_runs=NUMBER,
                continuous=only(pause_status_={"enum": ["PAUSED", "UNPAUSED"]}),
                job_clusters=array_of(
                    only(
                        job_cluster_key_=TEXT,
                        new_cluster_=only(
                            spark_version_=TEXT,
                            node_type_id_=TEXT,
                            num_workers_=NUMBER,
                            data_security_mode_={"enum": ["SINGLE_USER", "USER_ISOLATION"]},
                            spark_conf=TEXTS,
                            spark_env_vars=TEXTS,
                        ),
                    )
                ),
                tasks_=array_of(
                    only(
                        task_key_=TEXT,
                        job_cluster_key=TEXT,
                        libraries=array_of(only(whl_=TEXT)),
                        spark_python_task_=only(python_file_=TEXT, parameters=array_of(TEXT)),
                    )
                ),
            ),
        }
    ),
    targets_={
        "type": "object",
        "additionalProperties": only(mode_={"enum": ["development", "production"]}, default={"type": "boolean"}),
    },
)
"""The part of the bundle format that the file uses, after Databricks' documentation."""


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


@pytest.fixture
def application() -> Any:
    return documents("spark-application.yml")[0]


@pytest.fixture
def bundle() -> Any:
    return documents("databricks.yml")[0]


def task_of(bundle: Any) -> Any:
    return bundle["resources"]["jobs"]["group_to_delta"]["tasks"][0]


def test_hadolint_accepts_the_dockerfile() -> None:
    command = [str(Path(sys.executable).with_name("hadolint")), str(DEPLOY / "Dockerfile")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LINT_S, check=False)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yml")), ids=lambda path: path.name)
def test_yamllint_accepts_the_file(path: Path) -> None:
    assert [str(problem) for problem in linter.run(path.read_text(), STYLE)] == []


def test_the_operators_api_has_all_fields_of_the_application(application: Any) -> None:
    """The models of the Spark operator refuse wrong types and drop fields that they do not know."""
    from kubeflow_spark_api.models import SparkV1beta2SparkApplication  # seconds, in each process that imports it

    assert SparkV1beta2SparkApplication.from_dict(application).to_dict() == application
    misspelled = copy.deepcopy(application)
    misspelled["spec"]["executor"]["memoryOverHead"] = "1g"
    assert SparkV1beta2SparkApplication.from_dict(misspelled).to_dict() != misspelled


def test_network_policies_have_known_fields_only() -> None:
    policies = documents("spark-application.yml")[1:]
    assert len(policies) == 2
    for policy in policies:
        jsonschema.validate(policy, NETWORK_POLICY)
    policies[0]["spec"]["ingress"][0]["ports"][0]["portt"] = policies[0]["spec"]["ingress"][0]["ports"][0].pop("port")
    with pytest.raises(jsonschema.ValidationError, match="port"):
        jsonschema.validate(policies[0], NETWORK_POLICY)


def test_bundle_has_known_fields_and_variables_only(bundle: Any) -> None:
    jsonschema.validate(bundle, BUNDLE)
    used = set(re.findall(r"\$\{var\.(\w+)\}", (DEPLOY / "databricks.yml").read_text()))
    assert used == set(bundle["variables"])
    task_of(bundle)["libary"] = []
    with pytest.raises(jsonschema.ValidationError, match="libary"):
        jsonschema.validate(bundle, BUNDLE)


@pytest.mark.parametrize("platform", ["kubernetes", "databricks"])
def test_arguments_are_those_of_the_job(
    platform: str, application: Any, bundle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = task_of(bundle)["spark_python_task"]
    given = application["spec"]["arguments"] if platform == "kubernetes" else job["parameters"]
    given = [re.sub(r"^(--option-file=).*", rf"\1{DEPLOY / 'kafka.properties'}", argument) for argument in given]
    commands: Any = typer.main.get_command(app)
    parsed = commands.commands["run"].make_context("run", given).params
    assert parsed["trigger"] == "10 seconds"

    monkeypatch.setenv("KAFKA_USERNAME", "etl")
    monkeypatch.setenv("KAFKA_PASSWORD", "secret")
    options = settings_in(parsed["option_file"][0]) | dict(pair.split("=", 1) for pair in parsed["option"] or ())
    required = {"kafka.bootstrap.servers": "KAFKA:9093", "kafka.group.id": "etl", "subscribe": parsed["topics"]}
    assert dict(Options.parse(required | options).settings)["sasl.password"] == "secret"


def test_the_network_policy_opens_the_coordinator_port(application: Any) -> None:
    driver = documents("spark-application.yml")[1]
    name = application["metadata"]["name"]
    assert driver["spec"]["podSelector"]["matchLabels"]["sparkoperator.k8s.io/app-name"] == name
    ports = [each["port"] for each in driver["spec"]["ingress"][0]["ports"]]
    assert f"--option=coordinatorPort={ports[-1]}" in application["spec"]["arguments"]


def test_names_of_secrets_are_those_that_the_options_use(bundle: Any) -> None:
    cluster = bundle["resources"]["jobs"]["group_to_delta"]["job_clusters"][0]["new_cluster"]
    assert set(re.findall(r"\$\{(\w+)\}", (DEPLOY / "kafka.properties").read_text().partition("\n")[2])) == set(
        cluster["spark_env_vars"]
    )


def test_versions_are_those_that_are_tested(application: Any) -> None:
    spec, dockerfile = application["spec"], (DEPLOY / "Dockerfile").read_text()
    assert spec["sparkVersion"] == SPARK and f"spark:{SPARK}-scala2.13" in dockerfile
    assert spec["deps"]["packages"] == [f"io.delta:delta-spark_{compatibility.SPARK}_2.13:{compatibility.DELTA}.0"]
    assert spec["image"].endswith(f"spark-group-source:{__version__}")
    assert f"spark-group-source:{__version__} " in dockerfile
