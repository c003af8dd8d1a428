"""Answers of a service against the published descriptions of the Open Inference Protocol over REST.

``python tests/serving/oip/published_check.py open_inference_rest.yaml generate_rest.yaml`` (``make check-kserve`` gets
the files): every route of them is asked of the demo's service, with a language model, servables and requests that are
refused; routes, statuses and bodies must be those that it describes. Triton's extensions for binary tensors and for the
repository are published as text alone: answers must be as that has them, with the schemas that follow from it.
"""

from __future__ import annotations

import copy
import json
import math
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from email.message import Message
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml

ROOT = Path(__file__).parents[3]
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
AS_BYTES = {"parameters": {"binary_data_output": True}}
BINARY: dict[str, list[dict[str, Any]]] = {
    "demo": [{"inputs": [TEXT], "parameters": {"max_tokens": 4, "n": 2, "binary_data_output": True}}],
    "digits": [{"inputs": [IMAGE], **AS_BYTES}],
    "digits.classify_top3": [{
        "inputs": [IMAGE], **AS_BYTES,
        "outputs": [{"name": "labels"}, {"name": "scores", "parameters": {"binary_data": False}}],
    }],
    "add_sub": [{"inputs": NUMBERS, "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}],
    "complete": [{"inputs": [{**TEXT, "name": "code"}], **AS_BYTES}],
}  # fmt: skip
"""Requests for outputs as bytes: numbers and texts, all of them and some."""
SIZES = {"BOOL": 1, "INT32": 4, "INT64": 8, "UINT64": 8, "FP32": 4, "FP64": 8}
"""Bytes of an element."""
ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
INDEX = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {name: {"type": "string"} for name in ("name", "version", "state", "reason")},
        "required": ["name", "state", "reason"],
        "additionalProperties": False,
    },
}
"""$repository_index_response; refusals of all repository routes are an ERROR."""
ADMIN_KEY = "an-admin-key-of-theirs"


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

    def check_binary(self, head: bytes) -> None:
        """The JSON of an answer in which outputs have binary_data_size in place of data."""
        components = copy.deepcopy(self.described["components"])
        output = components["schemas"]["response_output"]
        output["required"].remove("data")
        size = {"properties": {"binary_data_size": {"type": "integer", "minimum": 0}}, "required": ["binary_data_size"]}
        output["oneOf"] = [{"required": ["data"]}, {"properties": {"parameters": size}, "required": ["parameters"]}]
        whole = {"$ref": "#/components/schemas/inference_response", "components": components}
        jsonschema_rs.validator_for(whole).validate(json.loads(head))


def ask(url: str, body: Any = None, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    status, _, found = ask_whole(url, body, headers)
    return status, found


def ask_whole(url: str, body: Any = None, headers: Mapping[str, str] | None = None) -> tuple[int, Message, bytes]:
    data = None if body is None else json.dumps(body).encode()
    given = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, data, given)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


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


def check_bytes(url: str, published: Published) -> int:
    """Outputs as bytes; how many answers were checked."""
    for model, bodies in BINARY.items():
        for body in bodies:
            status, headers, found = ask_whole(f"{url}/v2/models/{model}/infer", body)
            assert (status, headers["Content-Type"]) == (200, "application/octet-stream"), found[:200]
            json_bytes, wanted = int(headers["Inference-Header-Content-Length"]), body.get("outputs", [])
            published.check_binary(found[:json_bytes])
            outputs, at = json.loads(found[:json_bytes])["outputs"], json_bytes
            for one in outputs:
                size = one.get("parameters", {}).get("binary_data_size")
                if size is None:
                    continue
                piece, count = found[at : at + size], math.prod(one["shape"])
                assert len(piece) == (sum(sizes_of(piece, count)) if one["datatype"] == "BYTES" else
                                      count * SIZES[one["datatype"]]), one  # fmt: skip
                at += size
            assert at == len(found) == int(headers["Content-Length"])
            given = [one["name"] for one in wanted if one.get("parameters", {}).get("binary_data") is False]
            assert [one["name"] for one in outputs if "data" in one] == given
            assert [one["name"] for one in outputs] == [one["name"] for one in wanted or outputs]
    return sum(map(len, BINARY.values()))


def sizes_of(data: bytes, count: int) -> Iterator[int]:
    """Of each element of BYTES, its length's four bytes in front of it included."""
    at = 0
    for _ in range(count):
        yield (size := 4 + int.from_bytes(data[at : at + 4], "little"))
        at += size


def check_generate(url: str, described: dict[str, Any]) -> int:
    """Texts, whole and in events, by the description of text generation; how many answers were checked.

    It has 422 for what cannot be used, where this service has 400 as everywhere, with the body that it describes.
    """

    def validate(name: str, body: bytes | str) -> None:
        whole = {"$ref": f"#/components/schemas/{name}", "components": described["components"]}
        jsonschema_rs.validator_for(whole).validate(json.loads(body))

    good = {
        "text_input": "def add(a, b):",
        "parameters": {"max_tokens": 40, "temperature": 0, "top_p": 1, "stop": ["#"]},
    }
    wrong = [{}, {"text_input": 1}, {**good, "parameters": {"temperature": -1}}]
    for path in described["paths"]:
        versioned = url + path.replace("${MODEL_NAME}", "demo").replace("${MODEL_VERSION}", "1")
        for way in (versioned, versioned.replace("/versions/1", "")):
            status, found = ask(way, good)
            assert status == 200, found
            events = [one.removeprefix("data: ") for one in found.decode().split("\n\n") if one]
            for one in events:
                validate("GenerateStreamResponse" if path.endswith("stream") else "GenerateResponse", one)
            for body in wrong:
                status, found = ask(way, body)
                assert status == 400, found
                validate("GenerateErrorResponse", found)
    return len(described["paths"]) * 2 * (1 + len(wrong))


def check_repository(url: str) -> int:
    """Its three routes, by who may and who may not; how many answers were checked."""
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    index, change = f"{url}/v2/repository/index", f"{url}/v2/repository/models/"
    validators = {"index": jsonschema_rs.validator_for(INDEX), "error": jsonschema_rs.validator_for(ERROR)}
    count = 0

    def states(body: dict[str, Any]) -> dict[str, str]:
        nonlocal count
        status, found = ask(index, body)
        assert status == 200
        validators["index"].validate(json.loads(found))
        count += 1
        return {one["name"]: one["state"] for one in json.loads(found)}

    ready = dict.fromkeys(("demo", "digits", "add_sub", "complete"), "READY")
    assert states({}) == states({"ready": False}) == states({"ready": True}) == ready
    config = {"parameters": {"config": json.dumps({"versions": "latest:1"})}}
    for path, body, expected in (
        ("add_sub/unload", {"parameters": {"unload_dependents": False}}, {**ready, "add_sub": "UNAVAILABLE"}),
        ("add_sub/load", {}, ready),
        ("digits/load", config, ready),
    ):
        status, found = ask(change + path, body, admin)
        assert (status, json.loads(found)) == (200, {}), found
        assert states({}) == expected
        assert states({"ready": True}) == {name: one for name, one in expected.items() if one == "READY"}
        count += 1
    for address, body, headers, status in (
        (index, {"ready": 1}, {}, 400), (index, {"nonsense": True}, {}, 400), (change + "add_sub/load", {}, {}, 403),
        (change + "add_sub/unload", {}, {}, 403), (change + "nobody/load", {}, admin, 404),
        (change + "nobody/unload", {}, admin, 404), (change + "demo/load", {}, admin, 400),
        (change + "add_sub/load", {"parameters": {"config": "{"}}, admin, 400),
        (change + "add_sub/unload", {"parameters": {"unload_dependents": 1}}, admin, 400),
    ):  # fmt: skip
        answered, found = ask(address, body, headers)
        assert answered == status, (address, body, found)
        validators["error"].validate(json.loads(found))
        count += 1
    return count


def main(path: Path, generate: Path) -> None:
    servables = ROOT / "examples" / "servables"
    with tempfile.TemporaryFile("w+") as log, tempfile.NamedTemporaryFile("w") as keys:  # of mode 0600
        print(ADMIN_KEY, file=keys, flush=True)
        command = [sys.executable, "-m", "penstock", "serve", f"demo={ROOT / 'demo' / 'demo.psm'}", str(servables)]
        command += ["--port", "0", "--admin-key-file", keys.name]
        service = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert service.stdout is not None
            found = re.search(r"http://\S+", service.stdout.readline())
            assert found is not None, "the service does not start"
            url, published = found[0], Published(path)
            count = check(url, published) + check_bytes(url, published) + check_repository(url)
            count += check_generate(url, yaml.safe_load(generate.read_text()))
            print(f"{count} answers are as the published descriptions have them")
        finally:
            service.terminate()
            service.wait(60)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
