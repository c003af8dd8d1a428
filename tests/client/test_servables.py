"""penstock.Client and AsyncClient with servables: the same answers over HTTP and gRPC, as bytes and as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from penstock import LLM, AsyncClient, Client, SamplingParams, ServiceError, UnsupportedError
from penstock.client.tensors import InferResult
from penstock.errors import InvalidArgumentError
from penstock.serving.settings import GatewaySettings
from tests.support.command import DEMO
from tests.support.errors import raises
from tests.support.http_service import SECONDS, Service, address, until
from tests.support.stub_methods import StubMethods
from tests.support.waiting import eventually

PROMPT = "def add(a, b):"
X, Y = np.array([[1, 2], [3, 4]], np.float32), np.array([[5, 6], [7, 9]], np.float32)
ADMIN_KEY = "an-admin-key-of-theirs"
WAYS = ("bytes", "json", "grpc")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    admins = tmp_path_factory.mktemp("keys") / "admins"
    admins.write_text(ADMIN_KEY + "\n")
    admins.chmod(0o600)
    settings = GatewaySettings(grpc_port=0, admin_keys_file=admins)
    found = Service({"demo": LLM(DEMO)}, settings, methods=StubMethods())
    yield found
    found.close()


@pytest.fixture(params=WAYS)
def client(service: Service, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(address(service, request.param), binary=request.param == "bytes") as found:
        yield found


def run_async(service: Service, way: str, work: Callable[[AsyncClient], Any], **options: Any) -> Any:
    """Run a coroutine with an AsyncClient and return its result."""

    async def main() -> Any:
        async with AsyncClient(address(service, way), binary=way == "bytes", **options) as client:
            return await work(client)

    return asyncio.run(main())


def method(service: Service, name: str) -> Any:
    return service.methods.versions[name][-1]


def test_infer_sends_and_returns_arrays(client: Client) -> None:
    found = client.infer("sums", {"x": X, "y": Y}, method="both")
    assert (found.model, found.version, list(found)) == ("sums.both", "2", ["sum", "difference"])
    assert np.array_equal(found["sum"], X + Y)
    assert found["sum"].dtype == np.float32
    found = client.infer("sums", {"x": X.tolist(), "y": Y}, version="stable", outputs=("difference",))
    assert (found.version, list(found)) == ("1", ["difference"])
    assert np.array_equal(found["difference"], X - Y)


ARRAYS = {
    **{name: np.array([[0, 1], [1, 0]], name) for name in ("?", "u1", "<u2", "<u4", "<u8", "i1", "<i2", "<i4", "<i8")},
    **{name: np.array([[0, 1.5], [-2, 0]], name) for name in ("<f2", "<f4", "<f8")},
    "big-endian": np.array([[1, 2]], ">i4"),
    "strided": np.arange(12, dtype="<i4").reshape(2, 6)[:, ::2].T,
    "texts": np.array(["a\0b", "ü"], object),
    "fixed texts": np.array(["ab", "c"]),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_every_dtype_round_trips(client: Client, kind: str) -> None:
    array = ARRAYS[kind]
    found = client.infer("echo", {"x": array})["x"]
    wanted = [one.encode() for one in array.tolist()] if "text" in kind else array.tolist()
    assert found.tolist() == wanted
    assert found.shape == array.shape


def test_lists_become_tensors(client: Client) -> None:
    given = {"i": [[1, 2]], "f": [0.5], "b": [True], "t": ["a", "bc"], "r": [b"x\0"]}
    found = client.infer("echo", given)
    assert [str(found[name].dtype) for name in "ifb"] == ["int64", "float32", "bool"]
    assert found["t"].tolist() == [b"a", b"bc"]
    assert found["r"].tolist() == [b"x\0"]


@pytest.mark.parametrize(
    ("inputs", "field", "told"),
    [
        ({"x": [[1], [2, 3]]}, "x", ".* equal length"),
        ({"x": np.array([1j])}, "x", ".* got complex128"),
        ({"x": [None]}, "x", ".* got NoneType"),
        ({"x": ["a", 1]}, "x", "expected numbers"),
        ({"x": [{}]}, "x", "got dict"),
        ([1], "inputs", r".* got \[1\]"),
        ({1: [1]}, "inputs", r".* got \{1: \[1\]\}"),
    ],
)
def test_invalid_inputs_are_refused(inputs: Any, field: str, told: str) -> None:
    with raises(InvalidArgumentError, param=field, match=told):
        Client().infer("echo", inputs)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"timeout_s": 0}, "got 0"),
        ({"timeout_s": 5, "parameters": {"timeout": 5}}, "got both"),
        ({"parameters": {"a": [1]}}, "parameters: a: "),
        ({"parameters": [1]}, r"got \[1\]"),
        ({"outputs": "sum"}, "one string"),
        ({"version": 0}, "got 0"),
        ({"version": True}, "got True"),
        ({"version": 1.0}, r"got 1\.0"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], fact: str) -> None:
    with raises(InvalidArgumentError, param=next(iter(options)), match=fact):
        Client().infer("sums", {"x": X}, **options)


async def of_async(client: AsyncClient, name: str, inputs: Any, **options: Any) -> None:
    found = getattr(client, name)("sums", [inputs] if name == "infer_many" else inputs, **options)
    if name in ("infer", "infer_async"):
        await found
    else:
        async for _ in found:
            pass


INFERENCES = ("infer", "infer_async", "infer_many", "stream_infer")


@pytest.mark.parametrize("name", INFERENCES)
def test_unknown_options_are_refused_with_a_hint(name: str) -> None:
    for options, hint in (
        ({"binary": False}, "binary .*constructor"),
        ({"timeout": 2}, "timeout .*timeout_s"),
        ({"priority": 1}, "priority .*parameters="),
        ({"wait": 1}, "wait. Options: method, version, outputs, parameters, timeout_s"),
    ):
        with raises(InvalidArgumentError, param=next(iter(options)), match=f"^Client.{name}: .* {hint}"):
            list(getattr(Client(), name)("sums", [{"x": X}] if name == "infer_many" else {"x": X}, **options))
        with raises(InvalidArgumentError, param=next(iter(options)), match=f"^AsyncClient.{name}: .* {hint}"):
            asyncio.run(of_async(AsyncClient(), name, {"x": X}, **options))


@pytest.mark.parametrize("name", INFERENCES)
def test_inputs_without_names_are_refused(name: str) -> None:
    with raises(InvalidArgumentError, param="inputs"):
        list(getattr(Client(), name)("sums", [[1]] if name == "infer_many" else [1]))
    with raises(InvalidArgumentError, param="inputs"):
        asyncio.run(of_async(AsyncClient(), name, [1]))


def test_json_refuses_bytes_that_are_not_utf8(service: Service) -> None:
    with Client(service.url, binary=False) as client:
        with raises(InvalidArgumentError, param="x"):
            client.infer("echo", {"x": [b"\xff"]})
        with raises(ServiceError, param="bytes", match="binary_data") as caught:
            client.infer("odd", {"x": X})
    assert (caught.value.status, caught.value.code) == (400, "not_json")
    with Client(service.url) as client:
        assert client.infer("odd", {"x": X})["bytes"].tolist() == [b"\xff\x00"]


@pytest.mark.parametrize("way", WAYS)
def test_async_client_infers(service: Service, way: str) -> None:
    async def work(client: AsyncClient) -> None:
        found = await asyncio.gather(*(client.infer_async("sums", {"x": X + n, "y": Y}) for n in range(20)))
        assert all(np.array_equal(one["sum"], X + n + Y) for n, one in enumerate(found))
        many = client.infer_many("sums", ({"x": X + n, "y": Y} for n in range(50)), in_flight=7)
        assert [one["sum"][0, 0] async for one in many] == [6 + n for n in range(50)]
        assert await client.servables.is_ready("sums")
        assert (await client.servables.metadata("sums"))["versions"] == ["1", "2"]
        assert any(one["name"] == "echo" for one in await client.servables.index())
        assert (await client.servables.statistics("sums"))[0]["name"] == "sums.both"

    run_async(service, way, work)


def test_infer_many_keeps_order_and_yields_errors(client: Client) -> None:
    wrong = {"x": X}
    asked = [wrong if n % 10 == 3 else {"x": X + n, "y": Y} for n in range(40)]
    found = list(client.infer_many("sums", asked, in_flight=8))
    for n, one in enumerate(found):
        if n % 10 == 3:
            assert isinstance(one, ServiceError)
            assert (one.status, one.param) == (400, "y")
        else:
            assert not isinstance(one, ServiceError)
            assert np.array_equal(one["sum"], X + n + Y)
    futures = [client.infer_async("sums", {"x": X, "y": Y}) for _ in range(10)]
    assert all(np.array_equal(one.result(SECONDS)["difference"], X - Y) for one in futures)


def test_errors_are_equal_over_http_and_grpc(service: Service) -> None:
    found = []
    for way in WAYS:
        with Client(address(service, way), binary=way == "bytes", retries=0) as client:
            for name, inputs, options in (
                ("nobody", {"text_input": ["x"]}, {}),
                ("sums", {"x": X, "y": Y}, {"version": "7"}),
                ("sums", {"x": X}, {}),
                ("broken", {"x": X}, {}),
                ("sums", {"x": X, "y": Y}, {"parameters": {"strange": 1}}),
                ("sums", {"x": X, "y": Y}, {"parameters": {"priority": "high"}}),
            ):
                with pytest.raises(ServiceError) as caught:
                    client.infer(name, inputs, **options)
                error = caught.value
                assert error.request_id
                found.append((error.status, error.code, error.param, str(error).split(error.request_id)[0]))
    assert found[:6] == found[6:12] == found[12:]
    assert [one[0] for one in found[:6]] == [404, 404, 400, 500, 400, 400]


def test_metadata_statistics_and_changes(service: Service, client: Client) -> None:
    servables = client.servables
    assert servables.metadata("sums", method="both", version=1)["inputs"][0] == {
        "name": "x", "datatype": "FP32", "shape": [-1, 2]
    }  # fmt: skip
    before = servables.statistics("sums", version=2)
    client.infer("sums", {"x": X, "y": Y})
    after = servables.statistics("sums", version="2")
    assert after[0]["inference_count"] == before[0]["inference_count"] + 2
    assert after[0]["inference_stats"]["success"]["ns"] == before[0]["inference_stats"]["success"]["ns"] + 3000
    assert {one["name"] for one in servables.statistics()} >= {"demo", "sums.both"}
    assert {"name": "sums", "version": "1", "state": "READY", "reason": ""} in servables.index()
    with pytest.raises(ServiceError) as caught:
        servables.load("sums")
    assert (caught.value.status, caught.value.code) == (403, "admin_only")


@pytest.mark.parametrize("way", ["bytes", "grpc"])
def test_an_admin_loads_and_unloads(service: Service, way: str) -> None:
    methods = service.methods
    methods.changes.clear()
    with Client(address(service, way), api_key=ADMIN_KEY, retries=0) as client:
        client.servables.unload("zeros")
        assert not client.servables.is_ready("zeros")
        with pytest.raises(ServiceError) as caught:
            client.infer("zeros", {"n": np.zeros(1, np.int8)})
        assert caught.value.status == 503
        client.servables.load("zeros", versions="latest:2", labels={"stable": 1})
        assert client.infer("zeros", {"n": np.zeros(3, np.int8)})["zeros"].shape == (3, 4096)
        with raises(ServiceError, code="invalid_model") as caught:
            client.servables.load("broken")
        assert (caught.value.status, caught.value.code) == (400, "invalid_model")
    wanted = {"versions": "latest:2", "labels": {"stable": 1}}
    assert methods.changes == [("unload", "zeros", None), ("load", "zeros", wanted)]


@pytest.mark.parametrize("way", ["bytes", "grpc"])
def test_timeout_ends_the_request(service: Service, way: str) -> None:
    gated = method(service, "sums")
    gated.gate = asyncio.Event()
    before = len(gated.seen)
    try:
        with Client(address(service, way)) as client, pytest.raises(ServiceError) as caught:
            client.infer("sums", {"x": X, "y": Y}, timeout_s=0.5)
        assert caught.value.status == 504
        assert len(gated.seen) <= before + 1, "the request is sent once"
    finally:
        service.loop.call_soon_threadsafe(gated.gate.set)
        gated.gate = None
    until(lambda: service.num_open == 0)


@pytest.mark.parametrize("way", ["bytes", "grpc"])
def test_cancelling_a_task_cancels_the_request(service: Service, way: str) -> None:
    gated = method(service, "sums")
    gated.gate = asyncio.Event()
    before = gated.num_cancelled, len(gated.seen)

    async def work(client: AsyncClient) -> None:
        task = client.infer_async("sums", {"x": X, "y": Y})
        await eventually(lambda: len(gated.seen) != before[1])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    try:
        run_async(service, way, work)
        until(lambda: gated.num_cancelled == before[0] + 1)
    finally:
        service.loop.call_soon_threadsafe(gated.gate.set)
        gated.gate = None


def test_infer_serves_language_models(service: Service) -> None:
    with LLM(DEMO) as llm:
        text = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0)).text
    sampling = {"parameters": {"max_tokens": 12, "temperature": 0.0}}
    for way in WAYS:
        with Client(address(service, way), binary=way == "bytes") as client:
            assert client.infer("demo", {"text_input": [PROMPT]}, **sampling)["text_output"].tolist() == [text.encode()]


def _joined(pieces: list[InferResult], name: str) -> list[Any]:
    values = [value for one in pieces for value in one[name].reshape(-1).tolist()]
    return values if name == "output_ids" else [b"".join(values)]


@pytest.mark.parametrize("way", ["bytes", "grpc"])
def test_stream_infer_yields_parts_over_http_and_grpc(service: Service, way: str) -> None:
    sampling = {"parameters": {"max_tokens": 300, "temperature": 0.0}}
    with Client(address(service, way)) as client, Client(address(service, "grpc")) as other:
        whole = client.infer("demo", {"text_input": [PROMPT]}, **sampling)
        pieces = list(client.stream_infer("demo", {"text_input": [PROMPT]}, **sampling))
        assert b"".join(one["text_output"][0] for one in pieces) == whole["text_output"][0]
        assert len(pieces) > 1
        assert [one["finish_reason"][0] for one in pieces[:-1]] == [b""] * (len(pieces) - 1)
        assert pieces[-1]["finish_reason"].tolist() == whole["finish_reason"].tolist()
        theirs = list(other.stream_infer("demo", {"text_input": [PROMPT]}, **sampling))
        assert {(one.model, one.version, *one) for one in pieces} == {(one.model, one.version, *one) for one in theirs}
        for name in pieces[0]:  # how much is in a piece differs with the reader's pace
            ours, other_ones = ([one[name] for one in ones] for ones in (pieces, theirs))
            assert {one.dtype for one in ours} == {one.dtype for one in other_ones}
            assert {one.ndim for one in ours} == {one.ndim for one in other_ones}
        for name in ("output_ids", "text_output"):
            assert _joined(pieces, name) == _joined(theirs, name)
        ids = np.array(service.post("/tokenize", prompt=PROMPT)["tokens"])
        given = {"input_ids": ids, "max_tokens": np.array([300]), "temperature": [0.0]}
        found = list(client.stream_infer("demo", given, version="1", outputs=("text_output",), timeout_s=600))
        assert {(*one,) for one in found} == {("text_output",)}
        assert b"".join(one["text_output"][0] for one in found) == whole["text_output"][0]
        two = list(client.stream_infer("demo", {"text_input": [PROMPT]}, parameters={"max_tokens": 3, "n": 2}))
        assert {int(one["index"][0]) for one in two if one["finish_reason"][0]} == {0, 1}
        for parameters, param in (({"max_tokens": -1}, "max_tokens"), ({"max_token": 1}, "max_token")):
            with pytest.raises(ServiceError) as caught:
                list(client.stream_infer("demo", {"text_input": [PROMPT]}, parameters=parameters))
            assert (caught.value.status, caught.value.param) == (400, param)
        with pytest.raises(ServiceError) as caught:
            list(client.stream_infer("nobody", {"text_input": [PROMPT]}))
        assert caught.value.status == 404

    async def work(client: AsyncClient) -> bytes:
        pieces = client.stream_infer("demo", {"text_input": [PROMPT]}, **sampling)
        return b"".join([one["text_output"][0] async for one in pieces])

    assert run_async(service, way, work) == whole["text_output"][0]


def test_stream_infer_over_http_refuses_what_it_cannot_stream(service: Service) -> None:
    with Client(service.url) as client:
        for inputs, options, told in (
            ({"x": X, "y": Y}, {}, "sums: .* language models.* infer"),
            ({"text_input": ["a", "b"]}, {}, "one prompt"),
            ({"input_ids": [[1], [2]]}, {}, "one prompt"),
            ({"text_input": ["a"]}, {"outputs": ["text"]}, "outputs: "),
            ({"text_input": ["a"], "n": [1]}, {"parameters": {"n": 1}}, "n: .* both"),
        ):
            with pytest.raises((UnsupportedError, InvalidArgumentError), match=told):
                client.stream_infer("sums", inputs, **options)
        with raises(ServiceError, param="model", match="infer"):
            list(client.stream_infer("sums", {"text_input": ["a"]}))


@pytest.mark.parametrize("way", ["bytes", "grpc"])
def test_leaving_stream_infer_ends_the_request(service: Service, way: str) -> None:
    with Client(address(service, way)) as client:
        for _ in client.stream_infer("demo", {"text_input": [PROMPT]}, parameters={"ignore_eos": True}):
            break
        until(lambda: service.num_open == 0)

    async def work(client: AsyncClient) -> None:
        pieces = client.stream_infer("demo", {"text_input": [PROMPT]}, parameters={"ignore_eos": True})
        async for _ in pieces:
            break
        await pieces.aclose()

    run_async(service, way, work)
    until(lambda: service.num_open == 0)


def test_http_routes_are_refused_over_grpc(service: Service) -> None:
    with Client(address(service, "grpc")) as client, raises(UnsupportedError, param="url", match="http:// address"):
        client.complete("x")
