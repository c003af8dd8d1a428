"""The files of ``deploy/``: Kubernetes' own schemas, and the command line and the routes that they name.

The kinds of KServe and LeaderWorkerSet have no schema in a package.  Their pods are checked as pods, and their other
fields against the names in their documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.main import make_parser
from penstock.serving.http.app import operations

DEPLOY = Path(__file__).parents[2] / "deploy"
FIELDS = {
    "ServingRuntime": {"annotations", "supportedModelFormats", "protocolVersions", "containers"},
    "InferenceService": {"predictor"},
    "LeaderWorkerSet": {"replicas", "rolloutStrategy", "leaderWorkerTemplate"},
}
PREDICTOR = {"minReplicas", "maxReplicas", "scaleMetric", "scaleTarget", "terminationGracePeriodSeconds", "model"}


def documents() -> list[tuple[str, dict[str, Any]]]:
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    return [(file.name, document) for file in files for document in yaml.safe_load_all(file.read_text())]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """The pod of each document that has one."""
    for name, document in documents():
        spec = document["spec"]
        if document["kind"] == "Deployment":
            yield name, spec["template"]["spec"]
        elif document["kind"] == "ServingRuntime":
            yield name, {"containers": spec["containers"]}
        elif document["kind"] == "LeaderWorkerSet":
            for template in ("leaderTemplate", "workerTemplate"):
                yield name, spec["leaderWorkerTemplate"][template]["spec"]


def test_the_files_have_each_kind() -> None:
    kinds = {document["kind"] for _, document in documents()}
    assert kinds == {*FIELDS, "Deployment", "Service", "PodDisruptionBudget"}


def test_documents_fit_the_schemas_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="run: pip install kubernetes-validate")
    version = validate.latest_version()
    for _, document in documents():
        if document["kind"] not in FIELDS:
            validate.validate(document, version, strict=True)
    for name, spec in pods():
        validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}, version, strict=True
        )


def test_custom_kinds_have_only_documented_fields() -> None:
    for name, document in documents():
        kind = document["kind"]
        if kind in FIELDS:
            assert set(document["spec"]) <= FIELDS[kind], name
            assert {"apiVersion", "kind", "metadata", "spec"} == set(document)
        if kind == "InferenceService":
            assert set(document["spec"]["predictor"]) <= PREDICTOR


def test_containers_run_commands_that_parse() -> None:
    commands = []
    for _, spec in pods():
        for container in spec["containers"]:
            words = [word.replace("{{.Name}}", "demo") for word in container["args"]]
            args = make_parser([words[0]]).parse_args(words)
            commands.append(words[0])
            if words[0] == "serve":
                port = {port["containerPort"] for port in container["ports"]}
                assert args.port in port
    assert sorted(commands) == ["serve", "serve", "serve", "worker"]


def test_probes_ask_routes_of_the_service() -> None:
    paths = {operation.path for operation in operations()}
    probes = [
        container[probe]["httpGet"]["path"]
        for _, spec in pods()
        for container in spec["containers"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
        if probe in container
    ]
    assert len(probes) == 9
    assert set(probes) <= paths
    metrics = {value for _, document in documents() for key, value in annotations(document) if key.endswith("/path")}
    assert metrics == {"/metrics"}
    assert metrics <= paths


def annotations(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield from document["spec"].get("annotations", {}).items()
    yield from document["spec"].get("template", {}).get("metadata", {}).get("annotations", {}).items()


def test_a_pod_outlives_its_drain() -> None:
    for _, spec in pods():
        for container in spec["containers"]:
            drain = [word for word in container["args"] if word.startswith("--drain-seconds=")]
            if drain and "terminationGracePeriodSeconds" in spec:
                assert spec["terminationGracePeriodSeconds"] > int(drain[0].split("=")[1]) + 5
