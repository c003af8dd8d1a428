"""The documents of ``deploy/kubernetes`` against the types that packages of KServe and Prometheus have.

    python tests/project/published_schemas_check.py deploy/kubernetes

``make check-kserve`` runs it in an environment with kserve and cloudcoil-models-prometheus-operator.  KServe's types
are read as source, so its own dependencies are not needed.  The pods in them are checked by test_deploy.py.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

KINDS = {"ServingRuntime": "V1alpha1ServingRuntime", "InferenceService": "V1beta1InferenceService"}
PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float)}


@cache
def kserve_types() -> dict[str, tuple[dict[str, str], dict[str, str]]]:
    """The fields of each type of KServe: the Python names with their types, and with their names in documents."""
    spec = find_spec("kserve")
    assert spec is not None, "run: pip install --no-deps kserve==0.21.0"
    assert spec.origin is not None
    found = {}
    for file in Path(spec.origin).parent.joinpath("models").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                assigned = {
                    line.targets[0].id: ast.literal_eval(line.value)
                    for line in node.body
                    if isinstance(line, ast.Assign)
                    and isinstance(line.targets[0], ast.Name)
                    and line.targets[0].id in ("openapi_types", "attribute_map")
                }
                if len(assigned) == 2:
                    found[node.name] = (assigned["openapi_types"], assigned["attribute_map"])
    return found


def check(value: Any, kind: str, where: str, problems: list[str]) -> None:
    """Add what does not fit a type of KServe to ``problems``.  Types of Kubernetes itself are taken as they are."""
    if element := re.fullmatch(r"list\[(.*)\]", kind):
        if not isinstance(value, list):
            problems.append(f"{where}: expected a list, got {value!r}")
            return
        for number, one in enumerate(value):
            check(one, element[1], f"{where}[{number}]", problems)
    elif element := re.fullmatch(r"dict\(str, (.*)\)", kind):
        if not isinstance(value, dict):
            problems.append(f"{where}: expected an object, got {value!r}")
            return
        for name, one in value.items():
            check(one, element[1], f"{where}.{name}", problems)
    elif kind in PLAIN:
        if not isinstance(value, PLAIN[kind]) or (kind == "int" and isinstance(value, bool)):
            problems.append(f"{where}: expected {kind}, got {value!r}")
    elif kind in kserve_types():
        types, names = kserve_types()[kind]
        fields = {names[name]: types[name] for name in types}
        for name, one in value.items():
            if name not in fields:
                problems.append(f"{where}.{name}: expected a field of {kind}")
            else:
                check(one, fields[name], f"{where}.{name}", problems)


def check_monitor(document: dict[str, Any], where: str, problems: list[str]) -> None:
    """Add what does not fit a PodMonitor; a field that it does not have is lost on the way through its type."""
    from cloudcoil.models.prometheus_operator import v1
    from pydantic import ValidationError

    try:
        known = v1.PodMonitor.model_validate(document).model_dump(by_alias=True, exclude_unset=True, mode="json")
    except ValidationError as error:
        problems.append(f"{where}: {error}")
        return
    if known["spec"] != document["spec"]:
        problems.append(f"{where}: expected fields of a PodMonitor: {known['spec']}, got {document['spec']}")


def main() -> int:
    """Check all documents and return the exit status."""
    problems: list[str] = []
    num_checked = 0
    for file in sorted(Path(sys.argv[1]).glob("*.yaml")):
        for document in yaml.safe_load_all(file.read_text()):
            kind, where = document["kind"], f"{file.name}: {document['kind']}"
            if kind in KINDS:
                check(document, KINDS[kind], where, problems)
            elif kind == "PodMonitor":
                check_monitor(document, where, problems)
            else:
                continue
            num_checked += 1
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{num_checked} documents checked, {len(problems)} problems")
    return 1 if problems or num_checked < 4 else 0


if __name__ == "__main__":
    sys.exit(main())
