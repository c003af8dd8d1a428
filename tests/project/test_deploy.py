"""The files of ``deploy/``: Kubernetes' own schemas, and the command line and the routes that they name.

The pods of the kinds of KServe and LeaderWorkerSet are checked as pods, and their other fields against the names in
their documents.  ``make check-deploy`` checks those of KServe and Prometheus against the types of their packages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.main import make_parser
from penstock.llm.local_backend import LocalModels
from penstock.serving.http.app import operations
from penstock.serving.metrics import Metrics
from penstock.serving.workers.machines.remote_worker_client import LEAVE_S

DEPLOY = Path(__file__).parents[2] / "deploy"
FIELDS = {
    "ServingRuntime": {"annotations", "supportedModelFormats", "protocolVersions", "containers", "volumes"},
    "InferenceService": {"predictor"},
    "LeaderWorkerSet": {"replicas", "rolloutStrategy", "leaderWorkerTemplate"},
    "PodMonitor": {"selector", "podMetricsEndpoints"},
}
ENDPOINT = {"port", "scheme", "path", "interval", "authorization", "tlsConfig"}
PREDICTOR = {"minReplicas", "maxReplicas", "autoScaling", "terminationGracePeriodSeconds", "model"}


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
            yield name, {"containers": spec["containers"], "volumes": spec["volumes"]}
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
        if kind == "PodMonitor":
            assert all(set(endpoint) <= ENDPOINT for endpoint in document["spec"]["podMetricsEndpoints"])


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


def monitors() -> Iterator[dict[str, Any]]:
    for _, document in documents():
        if document["kind"] == "PodMonitor":
            yield document["spec"]


def test_metrics_are_asked_for_with_a_key_where_they_are() -> None:
    """An annotation cannot have the key, so only the runtime of KServe, which has no keys, has one."""
    runtime = next(document for _, document in documents() if document["kind"] == "ServingRuntime")
    paths = {runtime["spec"]["annotations"]["prometheus.kserve.io/path"]}
    for spec in monitors():
        templates = [one for one in labelled_pods() if spec["selector"]["matchLabels"].items() <= one[0].items()]
        assert templates
        for endpoint in spec["podMetricsEndpoints"]:
            paths.add(endpoint["path"])
            assert endpoint["authorization"]["credentials"]["key"]
            for _, pod in templates:
                ports = {port["name"] for container in pod["containers"] for port in container["ports"]}
                assert endpoint["port"] in ports
    assert paths == {"/metrics"} & {operation.path for operation in operations()}
    assert len([*monitors()]) == 2


def test_replicas_follow_metrics_that_are_there() -> None:
    (service,) = [document for _, document in documents() if document["kind"] == "InferenceService"]
    (scaling,) = service["spec"]["predictor"]["autoScaling"]["metrics"]
    query = scaling["external"]["metric"]["query"]
    text = Metrics(LocalModels([])).text().decode()
    found = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert set(re.findall(r"\w+:\w+", query)) <= found
    assert set(re.findall(r'model_name="(\w+)"', query)) == {service["metadata"]["name"]}


def labelled_pods() -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """The labels and the pod of each template that has labels."""
    for _, document in documents():
        spec = document["spec"]
        templates = [spec["template"]] if document["kind"] == "Deployment" else []
        if document["kind"] == "LeaderWorkerSet":
            templates = [spec["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate")]
        for template in templates:
            yield template["metadata"]["labels"], template["spec"]


def test_every_pod_has_a_disruption_budget() -> None:
    selectors = [one["spec"]["selector"]["matchLabels"] for _, one in documents() if "Disruption" in one["kind"]]
    for labels, _ in labelled_pods():
        assert any(selector.items() <= labels.items() for selector in selectors)
    services = [one["metadata"]["name"] for _, one in documents() if one["kind"] == "InferenceService"]
    assert [{"serving.kserve.io/inferenceservice": name} for name in services] == [
        selector for selector in selectors if "app" not in selector
    ]


def test_containers_are_confined() -> None:
    """The rules of the restricted pod security standard, and a root file system that cannot be written."""
    for name, spec in pods():
        pod = spec.get("securityContext", {})
        if name != "kserve.yaml":  # KServe sets the account of its pods
            assert spec["automountServiceAccountToken"] is False
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            context = pod | container["securityContext"]
            assert context["runAsNonRoot"]
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not context["allowPrivilegeEscalation"]
            assert context["readOnlyRootFilesystem"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert set(mounts) <= {volume["name"] for volume in spec["volumes"]}
            if container in spec["containers"]:
                assert "temporary" in mounts


def test_keys_and_tokens_come_from_secrets_as_files() -> None:
    for _, spec in pods():
        secrets = {volume["name"] for volume in spec["volumes"] if "secret" in volume}
        for container in spec["containers"]:
            assert "env" not in container
            words = [word for word in container["args"] if "key" in word or "token" in word]
            assert all(word.split("=")[0].endswith(("-file", "-key")) for word in words)
            assert all(word.split("=")[1].startswith("/private/") for word in words)
            assert not words or secrets


def test_a_pod_outlives_its_drain() -> None:
    for _, spec in pods():
        for container in spec["containers"]:
            drain = [word for word in container["args"] if word.startswith("--drain-seconds=")]
            if container["args"][0] == "worker":
                assert spec["terminationGracePeriodSeconds"] > LEAVE_S
            elif "terminationGracePeriodSeconds" in spec:
                assert spec["terminationGracePeriodSeconds"] > int(drain[0].split("=")[1]) + pause_s(container)
            else:
                pause_s(container)
    service = next(document for _, document in documents() if document["kind"] == "InferenceService")
    assert service["spec"]["predictor"]["terminationGracePeriodSeconds"] > 60 + 5


def pause_s(container: dict[str, Any]) -> int:
    """The time that a pod has to leave the endpoints of its service before it is told to end."""
    command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    return int(seconds)
