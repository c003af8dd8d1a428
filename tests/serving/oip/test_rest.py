"""The Open Inference Protocol over REST, seen by Triton's own client."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from penstock import __version__
from penstock.llm.llm import LLM
from penstock.serving.settings import GatewaySettings
from penstock.tensors import DTYPES
from tests.support.command import DEMO
from tests.support.http_service import KEY, Service
from tests.support.stub_methods import EVERY_DATATYPE, StubMethods

PROMPT = "def add(a, b):"
GREEDY = {"max_tokens": 12, "temperature": 0.0}
ADMIN_KEY = "an-admin-key-of-theirs"
X, Y = np.array([[1, 2], [3, 4]], np.float32), np.array([[5, 6], [7, 9]], np.float32)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    admins = tmp_path_factory.mktemp("keys") / "admins"
    admins.write_text(ADMIN_KEY + "\n")
    admins.chmod(0o600)
    found = Service({"demo": LLM(DEMO)}, GatewaySettings(admin_keys_file=admins), methods=StubMethods())
    yield found
    found.close()


@pytest.fixture
def client(service):
    with triton.InferenceServerClient(service.url.removeprefix("http://"), concurrency=4) as found:
        yield found


def tensor(name: str, array: np.ndarray, datatype: str, binary: bool = True) -> triton.InferInput:
    found = triton.InferInput(name, list(array.shape), datatype)
    found.set_data_from_numpy(array, binary_data=binary)
    return found


def sums(binary: bool = True) -> list[triton.InferInput]:
    return [tensor("x", X, "FP32", binary), tensor("y", Y, "FP32", binary)]


def text(value: str = PROMPT, binary: bool = True) -> triton.InferInput:
    return tensor("text_input", np.array([value], object), "BYTES", binary)


def test_server_metadata_has_both_published_paths(service):
    """The published text says v2, the published OpenAPI file /v2/."""
    found = [service.ask("GET", path) for path in ("/v2", "/v2/")]
    assert [status for status, _, _ in found] == [200, 200]
    assert found[0][2] == found[1][2]
    assert service.ask("GET", "/v2/models/")[0] == 404


def test_server_and_models(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    found = client.get_server_metadata()
    assert (found["name"], found["version"]) == ("penstock", __version__)
    assert found["extensions"] == [
        "binary_tensor_data", "generate", "model_configuration", "model_repository", "parameters", "schedule_policy",
        "statistics",
    ]  # fmt: skip
    for name, version in (("demo", ""), ("demo", "1"), ("sums", ""), ("sums.both", "2"), ("sums", "stable")):
        assert client.is_model_ready(name, version)
    for name, version in (("nobody", ""), ("demo", "7"), ("sums", "7"), ("sums.other", "")):
        assert not client.is_model_ready(name, version)
        with pytest.raises(InferenceServerException) as error:
            client.get_model_metadata(name, version)
        assert error.value.status() == "404"
    found = client.get_model_metadata("sums", "1")
    assert (found["name"], found["versions"], found["platform"]) == ("sums", ["1", "2"], "penstock_servable")
    assert found["inputs"] == [{"name": name, "datatype": "FP32", "shape": [-1, 2]} for name in ("x", "y")]
    found = client.get_model_metadata("demo")
    assert (found["versions"], found["inputs"]) == (
        ["1"], [{"name": "text_input", "datatype": "BYTES", "shape": [-1]}]
    )  # fmt: skip


def test_configuration(client):
    found = client.get_model_config("sums", "stable")
    for one in (found["input"], found["output"]):
        assert [(each["data_type"], each["dims"]) for each in one] == [("TYPE_FP32", [2])] * 2
    assert (found["name"], found["max_batch_size"], found["version_policy"]) == ("sums.both", 64, {"all": {}})
    assert found["instance_group"] == [{"name": "sums: stages", "kind": "KIND_CPU", "count": 2}]
    assert found["dynamic_batching"] == {
        "preferred_batch_size": [4, 8], "max_queue_delay_microseconds": 2000,
        "default_queue_policy": {"allow_timeout_override": True, "max_queue_size": 100},
    }  # fmt: skip
    found = client.get_model_config("demo")
    assert (found["max_batch_size"], found["model_transaction_policy"]) == (0, {"decoupled": True})
    assert found["input"] == [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [-1]}]
    for name, version in (("nobody", ""), ("demo", "7"), ("sums", "7"), ("sums.other", "")):
        with pytest.raises(InferenceServerException) as error:
            client.get_model_config(name, version)
        assert error.value.status() == "404"


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("wanted", [None, True, False])
def test_tensors_as_json_and_as_bytes(client, binary, wanted):
    """Inputs and outputs in either form; outputs all, or those asked for in their order."""
    names = ("difference", "sum")
    outputs = None if wanted is None else [triton.InferRequestedOutput(name, binary_data=wanted) for name in names]
    result = client.infer("sums.both", sums(binary), outputs=outputs, request_id="mine")
    assert np.array_equal(result.as_numpy("sum"), X + Y)
    assert np.array_equal(result.as_numpy("difference"), X - Y)
    head = result.get_response()
    assert (head["model_name"], head["model_version"], head["id"]) == ("sums.both", "2", "mine")
    assert [one["name"] for one in head["outputs"]] == [*names][:: 1 if outputs else -1]
    assert all(("data" in one) is (wanted is False) for one in head["outputs"])


def test_versions_and_labels(client):
    for version, found in (("", "2"), ("1", "1"), ("2", "2"), ("stable", "1")):
        assert client.infer("sums", sums(), model_version=version).get_response()["model_version"] == found


@pytest.mark.parametrize("datatype", DTYPES)
def test_every_datatype_there_and_back(service, client, datatype):
    array = EVERY_DATATYPE[datatype]
    if datatype == "BF16":  # Triton's client wants a package's type for it
        body = {"inputs": [{"name": "x", "datatype": "BF16", "shape": [2], "data": [1.5, -2.0]}]}
        status, _, data = service.ask("POST", "/v2/models/echo/infer", body)
        assert (status, json.loads(data)["outputs"][0]["data"]) == (200, [1.5, -2.0])
        return
    for binary in (True, False):
        result = client.infer("echo", [tensor("x", array, datatype, binary)])
        assert np.array_equal(result.as_numpy("x"), array)
        outputs = [triton.InferRequestedOutput("x", binary_data=False)]
        listed = client.infer("echo", [tensor("x", array, datatype, binary)], outputs=outputs).as_numpy("x")
        assert listed.tolist() == [one.decode() if datatype == "BYTES" else one for one in array.tolist()]
    seen = service.methods.versions["echo"][0].seen[-1].inputs["x"].array
    assert seen.dtype == DTYPES[datatype]
    assert not seen.flags.writeable


def test_nested_and_flat_data_are_the_same(service):
    def ask(data):
        inputs = [{"name": name, "datatype": "FP32", "shape": [2, 2], "data": data} for name in ("x", "y")]
        return service.post("/v2/models/sums/infer", inputs=inputs)["outputs"]

    assert ask([1, 2, 3, 4.5]) == ask([[1, 2], [3, 4.5]])
    assert ask([1, 2, 3, 4.5])[0] == {"name": "sum", "datatype": "FP32", "shape": [2, 2], "data": [2, 4, 6, 9]}


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression_both_ways(service, client, algorithm):
    x = np.zeros((64, 128), np.float32)
    result = client.infer(
        "echo", [tensor("x", x, "FP32")], request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )  # fmt: skip
    assert np.array_equal(result.as_numpy("x"), x)
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1000], "data": [0] * 1000}]}
    status, headers, data = service.ask("POST", "/v2/models/echo/infer", body, {"Accept-Encoding": f"{algorithm};q=1"})
    assert (status, headers["content-encoding"], len(data) < 200) == (200, algorithm, True)
    for header in ("identity", "br", f"{algorithm};q=0", ""):
        assert "content-encoding" not in service.ask(
            "POST", "/v2/models/echo/infer", body, {"Accept-Encoding": header}
        )[1]  # fmt: skip


def test_many_at_once(client):
    """Triton's own way of doing so, and answers that are each its own."""
    asked = [client.async_infer("echo", [tensor("x", np.full((1, 3), i, np.int32), "INT32")]) for i in range(20)]
    for i, one in enumerate(asked):
        assert one.get_result().as_numpy("x").tolist() == [[i] * 3]


@pytest.mark.parametrize("binary", [True, False])
def test_a_language_models_answer_is_that_of_completions(service, client, binary):
    expected = service.post("/v1/completions", prompt=PROMPT, **GREEDY)
    result = client.infer("demo", [text(binary=binary)], parameters=GREEDY, request_id="mine")
    (choice,), usage = expected["choices"], expected["usage"]
    assert [one.decode() for one in result.as_numpy("text_output")] == [choice["text"]]
    assert result.as_numpy("num_output_tokens").tolist() == [usage["completion_tokens"]]
    assert result.get_response()["id"] == "mine"
    one = [triton.InferRequestedOutput("text_output", binary_data=False)]
    listed = client.infer("demo", [text()], outputs=one, parameters=GREEDY).get_response()["outputs"]
    assert listed == [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": [choice["text"]]}]


def test_seeds_keep_all_their_digits(service):
    """Parameters are not made floats, which hold 53 bits."""
    seeded = {"max_tokens": 8, "temperature": 1.0, "seed": 2**63 - 1}
    expected = service.post("/v1/completions", prompt=PROMPT, **seeded)["choices"][0]["text"]
    inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [PROMPT]}]
    found = service.post("/v2/models/demo/infer", inputs=inputs, parameters=seeded, outputs=[{"name": "text_output"}])
    assert found["outputs"][0]["data"] == [expected]
    assert service.post("/v2/models/demo/generate", text_input=PROMPT, **seeded)["text_output"] == expected


def test_generate(service):
    expected = service.post("/v1/completions", prompt=PROMPT, **GREEDY)["choices"][0]
    found = service.post("/v2/models/demo/generate", id="mine", text_input=PROMPT, parameters=GREEDY)
    assert (found["id"], found["text_output"], found["finish_reason"]) == (
        "mine", expected["text"], expected["finish_reason"]
    )  # fmt: skip
    assert found == service.post("/v2/models/demo/versions/1/generate", id="mine", text_input=PROMPT, **GREEDY)
    ids = service.post("/tokenize", prompt=PROMPT)["tokens"]
    assert service.post("/v2/models/demo/generate", input_ids=ids, **GREEDY)["text_output"] == expected["text"]
    several = service.post("/v2/models/demo/generate", text_input=PROMPT, n=2, **GREEDY | {"temperature": 1, "seed": 3})
    assert [len(one) for one in several["output_ids"]] == several["num_output_tokens"] == [12, 12]


def test_generate_streams(service):
    wanted = GREEDY | {"max_tokens": 300, "ignore_eos": True}  # of few, pieces may all come together
    expected = service.post("/v2/models/demo/generate", text_input=PROMPT, **wanted)
    status, headers, data = service.ask(
        "POST", "/v2/models/demo/generate_stream", {"text_input": PROMPT, "parameters": wanted}
    )  # fmt: skip
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    lines = data.decode().split("\n\n")
    assert lines.pop() == ""
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert events  # how many depends on the pace of who reads them
    assert "".join(one["text_output"] for one in events) == expected["text_output"]
    assert [one["finish_reason"] for one in events] == [""] * (len(events) - 1) + [expected["finish_reason"]]
    assert [id for one in events for id in one["output_ids"]] == expected["output_ids"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("demo/generate", {}, 400, "text_input"),
        ("demo/generate", {"text_input": "x", "input_ids": [1]}, 400, "text_input"),
        ("demo/generate", {"text_input": "x", "stream": True}, 400, "stream"),
        ("demo/generate_stream", {"text_input": "x", "parameters": {"stream": False}}, 400, "stream"),
        ("demo/generate", {"text_input": "x", "n": 1, "parameters": {"n": 1}}, 400, "n"),
        ("demo/generate", {"text_input": "x", "logprobs": 1}, 400, "logprobs"),
        ("demo/generate", {"text_input": "x", "nonsense": 1}, 400, "nonsense"),
        ("sums/generate", {"text_input": "x"}, 400, "model"),
        ("nobody/generate", {"text_input": "x"}, 404, "model"),
        ("demo/versions/9/generate_stream", {"text_input": "x"}, 404, "model_version"),
    ],
)
def test_refusals_of_generate(service, path, body, status, param):
    found, headers, data = service.ask("POST", f"/v2/models/{path}", body)
    told = json.loads(data)
    assert (found, told["param"], headers["content-type"]) == (status, param, "application/json")
    assert isinstance(told["error"], str)
    assert set(told) == {"error", "type", "param", "code"}


def test_statistics(service, client):
    before = client.get_inference_statistics("sums", "2")["model_stats"][0]
    client.infer("sums", sums())
    (found,) = client.get_inference_statistics("sums", "2")["model_stats"]
    assert found["inference_count"] == before["inference_count"] + 2
    assert found["execution_count"] == before["execution_count"] + 1
    assert found["inference_stats"]["success"]["ns"] == before["inference_stats"]["success"]["ns"] + 3000
    assert found["batch_stats"][-1]["batch_size"] == 2
    assert [one["version"] for one in client.get_inference_statistics("sums")["model_stats"]] == ["1", "2"]
    before = client.get_inference_statistics("demo")["model_stats"][0]
    service.post("/v1/completions", prompt=PROMPT, n=2, **GREEDY)
    (found,) = client.get_inference_statistics("demo")["model_stats"]
    assert found["inference_count"] == before["inference_count"] + 2
    assert found["execution_count"] > before["execution_count"]
    assert found["inference_stats"]["compute_infer"]["ns"] > before["inference_stats"]["compute_infer"]["ns"]
    names = [one["name"] for one in client.get_inference_statistics()["model_stats"]]
    assert names == ["demo", "sums.both", "sums.both", "echo.it", "broken.it", "odd.it", "zeros.it"]


def test_the_repository(service, client):
    """Its index is for all, its changes for admins."""
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    index = client.get_model_repository_index()
    assert index[0] == {"name": "demo", "version": "1", "state": "READY", "reason": ""}
    client.unload_model("echo", headers=admin)
    try:
        assert not client.is_model_ready("echo")
        states = {one["name"]: one["state"] for one in client.get_model_repository_index()}
        assert (states["echo"], states["sums"]) == ("UNAVAILABLE", "READY")
        ready = json.loads(service.ask("POST", "/v2/repository/index", {"ready": True})[2])
        assert "echo" not in [one["name"] for one in ready]
    finally:
        client.load_model("echo", headers=admin, config='{"versions": "all"}')
    assert client.is_model_ready("echo")
    assert service.methods.changes == [("unload", "echo", None), ("load", "echo", {"versions": "all"})]


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        (lambda client, **a: client.load_model("demo", **a), "400", "admin socket"),
        (lambda client, **a: client.unload_model("demo", **a), "400", "admin socket"),
        (lambda client, **a: client.load_model("nobody", **a), "404", "nobody"),
        (lambda client, **a: client.load_model("broken", **a), "400", "expected a stage"),
        (lambda client, **a: client.load_model("sums", config="{", **a), "400", "config"),
        (lambda client, **a: client.load_model("sums", config='{"x": 1}', **a), "400", "config"),
        (lambda client, **a: client.load_model("sums", config="{}", files={"file:1/x": b"y"}, **a), "400", "file:1/x"),
        (lambda client, **a: client.unload_model("sums", unload_dependents=True, **a), "400", "unload_dependents"),
    ],
)
def test_changes_that_are_refused(service, client, change, status, text):
    before = list(service.methods.changes)
    with pytest.raises(InferenceServerException) as error:
        change(client, headers={"Authorization": f"Bearer {ADMIN_KEY}"})
    assert (error.value.status(), text in error.value.message()) == (status, True), error.value.message()
    with pytest.raises(InferenceServerException) as error:
        change(client)
    assert error.value.status() == "403"
    assert service.methods.changes == before


def test_no_changes_without_a_file_of_admins_keys(serve, tmp_path):
    """Also for who has an API key; and the refusal says what the service was started without."""
    keys = tmp_path / "keys"
    keys.write_text(KEY + "\n")
    keys.chmod(0o600)
    locked = serve(settings=GatewaySettings(keys_file=keys))
    for path in ("sums/load", "sums/unload"):
        status, _, data = locked.ask("POST", f"/v2/repository/models/{path}", {}, {"Authorization": f"Bearer {KEY}"})
        told = json.loads(data)
        assert (status, told["code"], "--admin-key-file" in told["error"]) == (403, "admin_only", True)
        assert locked.ask("POST", f"/v2/repository/models/{path}", {})[0] == 401
    admins = tmp_path / "admins"
    admins.write_text(ADMIN_KEY + "\n")
    admins.chmod(0o600)
    both = serve(settings=GatewaySettings(keys_file=keys, admin_keys_file=admins))
    path, body = "/v2/repository/models/sums/load", {}
    assert both.ask("POST", path, body, {"Authorization": f"Bearer {KEY}"})[0] == 403
    assert both.ask("POST", path, body, {"Authorization": f"Bearer {ADMIN_KEY}"})[0] == 404
    assert both.ask("GET", "/v1/models", headers={"Authorization": f"Bearer {ADMIN_KEY}"})[0] == 200
