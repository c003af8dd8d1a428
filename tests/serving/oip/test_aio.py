"""The Open Inference Protocol with Triton's asyncio clients: each call that applies, over both protocols."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import tritonclient.http.aio as over_http
from tritonclient.utils import InferenceServerException

from penstock import __version__
from penstock.serving.grpc import compression
from penstock.serving.http.compression import inflated
from tests.support.aio_clients import ADMIN, GREEDY, PROMPT, WAYS, as_json, plain, refusal, service_of, talk, tensor


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with service_of(tmp_path_factory.mktemp("service")) as found:
        yield found


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


def test_server_and_models(service, way):
    async def work(client):
        assert await client.is_server_live()
        assert await client.is_server_ready()
        found = await client.get_server_metadata(**as_json(way))
        assert (found["name"], found["version"]) == ("penstock", __version__)
        assert {"model_repository", "statistics"} < {*found["extensions"]}
        for name, version in (("demo", "1"), ("numbers", ""), ("numbers.turned", "1"), ("numbers", "stable")):
            assert await client.is_model_ready(name, version) is True
        for name, version in (("nobody", ""), ("demo", "7"), ("numbers", "7"), ("numbers.other", "")):
            if way == "http":
                assert await client.is_model_ready(name, version) is False
            else:  # as KServe's servers have it
                assert (await refusal(way, client.is_model_ready(name, version)))[0] == "404"
            for ask in (client.get_model_metadata, client.get_model_config, client.get_inference_statistics):
                assert (await refusal(way, ask(name, version)))[0] == "404"
        found = plain(await client.get_model_metadata("numbers", "1", **as_json(way)))
        assert found == {
            "name": "numbers", "versions": [1, 2], "platform": "penstock_servable",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}],
        }  # fmt: skip
        found = await client.get_model_metadata("demo", **as_json(way))
        assert [one["name"] for one in found["inputs"]] == ["text_input"]

    talk(service, way, work)


def test_configuration(service, way):
    async def work(client):
        found = plain(await client.get_model_config("numbers", "stable", **as_json(way)))
        found = found["config"] if way == "grpc" else found
        assert found["dynamic_batching"]["preferred_batch_size"] == [4, 8]
        assert found["dynamic_batching"]["max_queue_delay_microseconds"] == 1000
        assert found["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}]
        assert (found["instance_group"][0]["count"], found["version_policy"]) == (1, {"all": {}})
        found = await client.get_model_config("demo", **as_json(way))
        assert (found["config"] if way == "grpc" else found)["model_transaction_policy"] == {"decoupled": True}

    talk(service, way, work)


def _text(value):
    """Over REST the client gives what was JSON as texts."""
    return value.decode() if isinstance(value, bytes) else value


@pytest.mark.parametrize("binary", [True, False])
def test_numbers_and_words(service, way, binary):
    x, words = np.array([[1, 2.5], [-3, 0]], np.float32), ["ab", "ü", "x y"]
    options = {} if way == "grpc" else {"binary_data": binary}

    async def work(client):
        wanted = WAYS[way].InferRequestedOutput("y", **options)
        found = await client.infer("numbers", [tensor(way, "x", x, binary)], outputs=[wanted], request_id="mine")
        assert found.as_numpy("y").dtype == np.float32
        assert np.array_equal(found.as_numpy("y"), 2 * x)
        head = found.get_response(**as_json(way))
        assert (head["model_name"], head["model_version"], head["id"]) == ("numbers.scale", "2", "mine")
        parts = WAYS[way].InferRequestedOutput("part", **options)
        found = await client.infer("numbers.turned", [tensor(way, "word", words, binary)], outputs=[parts])
        assert found.as_numpy("part").tolist() == [5, 5, 3]
        assert found.as_numpy("back") is None
        back = WAYS[way].InferRequestedOutput("back", **options)
        found = await client.infer("numbers.turned", [tensor(way, "word", ["abc", "no lemon"], binary)], outputs=[back])
        assert [_text(one) for one in found.as_numpy("back")] == ["cba", "nomel on"]
        raw = np.array([b"\xff\0\1", b"abc"], object)
        found = await client.infer("numbers.turned", [tensor(way, "word", raw)])
        assert found.as_numpy("back").tolist() == [b"\1\0\xff", b"cba"]
        expected = service.post("/v1/completions", prompt=PROMPT, **GREEDY)["choices"][0]["text"]
        text = [tensor(way, "text_input", [PROMPT], binary)]
        outputs = [WAYS[way].InferRequestedOutput("text_output", **options)]
        found = await client.infer("demo", text, outputs=outputs, parameters=GREEDY)
        assert [_text(one) for one in found.as_numpy("text_output")] == [expected]

    talk(service, way, work)


def test_bodies_that_are_sent_by_other_means(service):
    """What the client makes of a request, and reads of an answer, without its connection."""
    x = np.array([[1, 2.5]], np.float32)
    client = over_http.InferenceServerClient
    data, json_bytes = client.generate_request_body([tensor("http", "x", x)], request_id="mine")
    length = {"Inference-Header-Content-Length": str(json_bytes)}
    status, headers, answer = service.ask("POST", "/v2/models/numbers/infer", data, length)
    assert status == 200
    found = client.parse_response_body(answer, header_length=int(headers["inference-header-content-length"]))
    assert np.array_equal(found.as_numpy("y"), 2 * x)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression_both_ways(service, algorithm):
    x = np.arange(2000, dtype=np.float32).reshape(1000, 2)

    async def work(client):
        seen, post = [], client._post

        async def noting(*given, **named):
            seen.append(await post(*given, **named))
            return seen[-1]

        client._post = noting
        options = {"request_compression_algorithm": algorithm, "response_compression_algorithm": algorithm}
        for binary in (True, False):
            outputs = [over_http.InferRequestedOutput("y", binary_data=binary)]
            inputs = [tensor("http", "x", x, binary)]
            found = await client.infer("numbers", inputs, outputs=outputs, **options)
            assert np.array_equal(found.as_numpy("y"), 2 * x)
            assert seen[-1].headers["Content-Encoding"] == algorithm
            assert seen[-1].request_info.headers["Content-Encoding"] == algorithm
        wrong = tensor("http", "x", x.reshape(-1))
        assert await refusal("http", client.infer("numbers", [wrong], **options)) == (
            "400", "x: expected the shape [-1, 2], batch first, got [2000]"
        )  # fmt: skip

    talk(service, "http", work)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_messages(service, algorithm, monkeypatch):
    x, seen = np.zeros((1000, 2), np.float32), []

    def noting(data, encoding, *others):
        seen.append(encoding)
        return inflated(data, encoding, *others)

    monkeypatch.setattr(compression, "inflated", noting)

    async def work(client):
        inputs = [tensor("grpc", "x", x)]
        found = await client.infer("numbers", inputs, compression_algorithm=algorithm)
        assert np.array_equal(found.as_numpy("y"), x)
        assert seen == [algorithm]

        async def requests():
            for n in range(3):
                inputs = [tensor("grpc", "x", x + n)]
                yield {"model_name": "numbers", "inputs": inputs, "request_id": str(n)}

        found = {}
        async for result, error in client.stream_infer(requests(), compression_algorithm=algorithm):
            assert error is None
            found[result.get_response().id] = result.as_numpy("y")
        assert seen == [algorithm] * 4
        assert all(np.array_equal(found[str(n)], 2 * (x + n)) for n in range(3))
        wrong = tensor("grpc", "x", x.reshape(-1))
        assert await refusal("grpc", client.infer("numbers", [wrong], compression_algorithm=algorithm)) == (
            "400", "x: expected the shape [-1, 2], batch first, got [2000]"
        )  # fmt: skip

    talk(service, "grpc", work)


def test_many_at_once(service, way):
    """Of all kinds, each with its own answer."""
    factors = {"": 2, "1": 1, "2": 2, "stable": 1}
    prompts = [PROMPT, "class Stack:", "import", "for i in"]
    expected = [one["text"] for one in service.post("/v1/completions", prompt=prompts, **GREEDY)["choices"]]

    async def number(client, n):
        x, version = np.array([[n, n + 0.5]] * (n % 5 + 1), np.float32), [*factors][n % 4]
        found = await client.infer(
            "numbers", [tensor(way, "x", x, n % 3 == 0)], model_version=version, request_id=f"r{n}"
        )  # fmt: skip
        assert np.array_equal(found.as_numpy("y"), x * factors[version])
        return found.get_response(**as_json(way))["id"]

    async def word(client, n):
        given = [f"{n}.{k}" for k in range(n % 3 + 1)]
        found = await client.infer("numbers.turned", [tensor(way, "word", given, n % 2 == 0)])
        assert found.as_numpy("back").tolist() == [one[::-1].encode() for one in given]

    async def text(client, n):
        found = await client.infer("demo", [tensor(way, "text_input", [prompts[n % 4]])], parameters=GREEDY)
        assert [one.decode() for one in found.as_numpy("text_output")] == [expected[n % 4]]

    async def work(client):
        asked = [one(client, n) for n in range(64) for one in (number, word)]
        asked += [text(client, n) for n in range(8)]
        found = await asyncio.gather(*asked)
        assert [one for one in found if one] == [f"r{n}" for n in range(64)]

    talk(service, way, work)


def test_statistics(service, way):
    async def work(client):
        async def told(*names):
            return plain(await client.get_inference_statistics(*names, **as_json(way)))["model_stats"]

        async def ask(version):
            await client.infer("numbers", [tensor(way, "x", np.zeros((3, 2)))], model_version=version)

        for version in ("1", "2"):
            await ask(version)
        before = await told("numbers")
        await ask("2")
        after = await told("numbers")
        counts = [[one["inference_count"] for one in found] for found in (before, after)]
        assert [b - a for a, b in zip(*counts, strict=True)] == [0, 3]
        assert after[0] == before[0]
        assert after[1]["execution_count"] == before[1]["execution_count"] + 1
        assert {("demo", 1), ("numbers.turned", 2), ("waiting.waited", 1)} < {
            (one["name"], one["version"]) for one in await told()
        }

    talk(service, way, work)


def test_the_repository(service, way):
    """With an admin's key, for a call or by a plugin for all of them."""

    class Bearer(WAYS[way].InferenceServerClientPlugin):
        def __call__(self, request):
            request.headers = {**(request.headers or {}), **ADMIN}

    async def work(client):
        async def states():
            found = await client.get_model_repository_index(**as_json(way))
            return {one["name"]: one["state"] for one in (found["models"] if way == "grpc" else found)}

        assert await states() == dict.fromkeys(("demo", "numbers", "waiting", "spare"), "READY")
        for change in (client.load_model, client.unload_model):
            assert (await refusal(way, change("spare")))[0] == "403"
        await client.unload_model("spare", headers=ADMIN)
        assert (await states())["spare"] == "UNAVAILABLE"
        assert not await client.is_model_ready("spare")
        client.register_plugin(Bearer())
        await client.load_model("spare", config='{"labels": {"canary": 1}}')
        assert await client.is_model_ready("spare", "canary")
        found = await client.infer("spare", [tensor(way, "x", np.zeros(2, np.int64))], model_version="canary")
        assert found.as_numpy("y").tolist() == [1, 1]
        assert (await refusal(way, client.load_model("nobody")))[0] == "404"
        status, text = await refusal(way, client.load_model("spare", config='{"labels": {"canary": 7}}'))
        assert (status, "7" in text) == ("400", True)
        assert (await refusal(way, client.unload_model("demo")))[0] == "400"
        assert await client.is_model_ready("spare", "canary")

    talk(service, way, work)


X = np.zeros((1, 2), np.float32)


@pytest.mark.parametrize(
    ("model", "inputs", "options", "status", "text"),
    [
        ("nobody", {"x": X}, {}, "404", "Available: demo, numbers, spare, waiting."),
        ("numbers.other", {"x": X}, {}, "404", "numbers.scale"),
        ("numbers", {"x": X}, {"model_version": "7"}, "404", "7"),
        ("numbers", {"x": np.zeros((1, 3))}, {}, "400", "x: expected the shape [-1, 2]"),
        ("numbers", {"x": X.astype(np.int32)}, {}, "400", "x: expected the datatype FP32, got INT32"),
        ("numbers", {"x": ["1"]}, {}, "400", "x: expected the datatype FP32, got BYTES"),
        ("numbers", {"x": X[:0]}, {}, "400", "instances"),
        ("numbers", {"z": X}, {}, "400", "x: input missing"),
        ("numbers", {"x": X, "z": X}, {}, "400", "z"),
        ("numbers", {"x": X}, {"outputs": ["z"]}, "400", "z"),
        ("numbers", {"x": X}, {"parameters": {"nonsense": 1}}, "400", "nonsense"),
        ("numbers", {"x": X}, {"sequence_id": 5}, "400", "sequence"),
        ("numbers.turned", {"word": ["a", ""]}, {}, "400", "turn, instance 1: a word is expected"),
        ("numbers.turned", {"word": [" "]}, {}, "500", "turn"),
        ("demo", {"x": X}, {}, "400", "x"),
        ("demo", {"text_input": [PROMPT]}, {"parameters": {"temperature": -1.0}}, "400", "temperature"),
    ],
)
def test_wrong_options_are_refused_with_a_reason(service, way, model, inputs, options, status, text):
    """The client's exception has the status, and a text that says what is wrong."""

    async def work(client):
        asked = dict(options)
        if "outputs" in asked:
            asked["outputs"] = [WAYS[way].InferRequestedOutput(name) for name in asked["outputs"]]
        tensors = [tensor(way, name, value) for name, value in inputs.items()]
        found = await refusal(way, client.infer(model, tensors, **asked))
        assert (found[0], text in found[1]) == (status, True), found

    talk(service, way, work)


def test_calls_for_what_is_not_built_are_refused(service, way):
    async def work(client):
        for ask in (
            client.get_trace_settings, client.get_log_settings, client.get_system_shared_memory_status,
            client.get_cuda_shared_memory_status,
        ):  # fmt: skip
            with pytest.raises(InferenceServerException) as error:
                await ask()
            assert error.value.status() == {"http": "404", "grpc": "StatusCode.UNIMPLEMENTED"}[way]
            text = error.value.message()
            assert isinstance(text, str)
            assert "decoding" not in text  # of an answer that the client cannot read

    talk(service, way, work)
