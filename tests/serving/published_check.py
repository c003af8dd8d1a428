"""Answers of a service against the published description of the Open Inference Protocol over REST.

``python tests/serving/published_check.py open_inference_rest.yaml`` (``make check-kserve`` fetches the file): every
route of it is asked of the demo's service, with a language model, a servable and requests that are refused; routes,
statuses and bodies must be those that it describes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml

ROOT = Path(__file__).parents[2]
TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["def add(a, b):"]}
IMAGE = {"name": "image", "datatype": "FP32", "shape": [2, 64], "data": [[0.0] * 64, [1.0] * 64]}
NUMBERS = [{"name": name, "datatype": "FP32", "shape": [1, 2, 2], "data": [1, 2, 3, 4]} for name in ("x1", "x2", "x3")]
ASKED: dict[str, list[dict[str, Any]]] = {
    "demo": [{"inputs": [TEXT], "id": "7", "parameters": {"max_tokens": 4}}, {"inputs": []}, {"inputs": [IMAGE]}],
    "digits": [{"inputs": [IMAGE]}, {"inputs": [IMAGE], "outputs": [{"name": "label"}]}, {"inputs": [TEXT]}],
    "digits.classify_top3": [{"inputs": [IMAGE]}, {"inputs": [{**IMAGE, "shape": [-1, 64]}]}],
    "add_sub": [{"inputs": NUMBERS}, {"inputs": NUMBERS[:2]}, {"inputs": 1}],
}
"""Good requests and such as are refused, by the model."""


class Published:
    """The description: its paths, and what checks a body."""

    def __init__(self, path: Path) -> None:
        self.described = yaml.safe_load(path.read_text())
        self.paths: dict[str, Any] = self.described["paths"]

    def check(self, path: str, verb: str, status: int, body: bytes) -> None:
        """A body has the form that the path's answer of that status has; a status without one is 404 or 503."""
        found = self.paths[path][verb]["responses"].get(str(status))
        if found is None:  # only what it does not describe at all
            assert status in (404, 503), (path, status, body[:200])
            found = self.paths["/v2/models/${MODEL_NAME}/versions/${MODEL_VERSION}/infer"]["post"]["responses"]["400"]
        schema = found.get("content", {}).get("application/json", {}).get("schema")
        if schema is not None:
            whole = {**schema, "components": self.described["components"]}
            jsonschema_rs.validator_for(whole).validate(json.loads(body))


def ask(url: str, body: Any = None) -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def check(url: str, published: Published) -> int:
    """Ask everything; how many answers were checked."""
    count, statuses = 0, set()
    for path, verbs in published.paths.items():
        models = {**ASKED, "nobody": [{"inputs": [TEXT]}]} if "MODEL_NAME" in path else {"": []}
        for model, bodies in models.items():
            way = path.replace("${MODEL_NAME}", model)
            ways = [way.replace("${MODEL_VERSION}", "1"), way.replace("/versions/${MODEL_VERSION}", "")]
            for one in dict.fromkeys(ways):
                for verb in verbs.keys() & {"get", "post"}:
                    for body in bodies if verb == "post" else [None]:
                        status, found = ask(url + one, body)
                        published.check(path, verb, status, found)
                        statuses.add((path, status))
                        count += 1
    assert {status for path, status in statuses if path.endswith("/infer")} == {200, 400, 404}
    assert all((path, 200) in statuses for path in published.paths), statuses
    return count


def main(path: Path) -> None:
    servables = ROOT / "examples" / "servables"
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "penstock", "serve", f"demo={ROOT / 'demo' / 'demo.psm'}", str(servables)]
        service = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert service.stdout is not None
            found = re.search(r"http://\S+", service.stdout.readline())
            assert found is not None, "the service does not start"
            print(f"{check(found[0], Published(path))} answers are as the published description has them")
        finally:
            service.terminate()
            service.wait(60)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
