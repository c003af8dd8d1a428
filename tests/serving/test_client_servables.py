"""penstock.Client and AsyncClient with servables: the same answers over HTTP and gRPC, as bytes and as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from penstock import LLM, AsyncClient, Client, SamplingParams, ServiceError, UnsupportedError
from penstock.errors import InvalidArgumentError
from penstock.serving.settings import DoorLimits, DoorSettings
from tests.cli.conftest import DEMO
from tests.serving.service import KEY, SECONDS, Service, until
from tests.serving.stub_methods import StubMethods

PROMPT = "def add(a, b):"
X, Y = np.array([[1, 2], [3, 4]], np.float32), np.array([[5, 6], [7, 9]], np.float32)
ADMIN_KEY = "an-admin-key-of-theirs"
WAYS = ("bytes", "json", "grpc")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    admins = tmp_path_factory.mktemp("keys") / "admins"
    admins.write_text(ADMIN_KEY + "\n")
    admins.chmod(0o600)
    settings = DoorSettings(grpc_port=0, admin_keys_file=admins)
    found = Service({"demo": LLM(DEMO)}, settings, methods=StubMethods())
    yield found
    found.close()


def address(service: Service, way: str) -> str:
    return f"grpc://{service.grpc_address}" if way == "grpc" else service.url


@pytest.fixture(params=WAYS)
def client(service: Service, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(address(service, request.param), binary=request.param == "bytes") as found:
        yield found


def asked(service: Service, way: str, work: Callable[[AsyncClient], Any], **options: Any) -> Any:
    """What a coroutine gives that asks with an AsyncClient."""

    async def main() -> Any:
        async with AsyncClient(address(service, way), binary=way == "bytes", **options) as client:
            return await work(client)

    return asyncio.run(main())


def method(service: Service, name: str) -> Any:
    return service.methods.versions[name][-1]


def test_arrays_in_and_out(client: Client) -> None:
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
def test_every_kind_of_array_there_and_back(client: Client, kind: str) -> None:
    array = ARRAYS[kind]
    found = client.infer("echo", {"x": array})["x"]
    wanted = [one.encode() for one in array.tolist()] if "text" in kind else array.tolist()
    assert found.tolist() == wanted
    assert found.shape == array.shape


def test_lists(client: Client) -> None:
    given = {"i": [[1, 2]], "f": [0.5], "b": [True], "t": ["a", "bc"], "r": [b"x\0"]}
    found = client.infer("echo", given)
    assert [str(found[name].dtype) for name in "ifb"] == ["int64", "float32", "bool"]
    assert found["t"].tolist() == [b"a", b"bc"]
    assert found["r"].tolist() == [b"x\0"]


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ({"x": [[1], [2, 3]]}, "x: its lists differ in length"),
        ({"x": np.array([1j])}, "x: complex128 is no type"),
        ({"x": [None]}, "x: expected numbers, texts or bytes, found NoneType"),
        ({"x": ["a", 1]}, "x: expected numbers"),
        ({"x": [{}]}, "found dict"),
    ],
)
def test_what_is_no_tensor(inputs: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        Client().infer("echo", inputs)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": 5, "parameters": {"timeout": 5}}, "not both"),
        ({"parameters": {"a": [1]}}, "parameter a must be"),
        ({"outputs": "sum"}, "outputs must be a sequence"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        Client().infer("sums", {"x": X}, **options)


def test_bytes_that_json_cannot_hold(service: Service) -> None:
    with Client(service.url, binary=False) as client:
        with pytest.raises(InvalidArgumentError, match="leave binary on"):
            client.infer("echo", {"x": [b"\xff"]})
        with pytest.raises(ServiceError, match="binary_data") as caught:
            client.infer("odd", {"x": X})
    assert (caught.value.status, caught.value.code) == (400, "not_json")
    with Client(service.url) as client:
        assert client.infer("odd", {"x": X})["bytes"].tolist() == [b"\xff\x00"]


@pytest.mark.parametrize("way", WAYS)
def test_for_asyncio(service: Service, way: str) -> None:
    async def work(client: AsyncClient) -> None:
        found = await asyncio.gather(*(client.infer_async("sums", {"x": X + n, "y": Y}) for n in range(20)))
        assert all(np.array_equal(one["sum"], X + n + Y) for n, one in enumerate(found))
        many = client.infer_many("sums", ({"x": X + n, "y": Y} for n in range(50)), in_flight=7)
        assert [one["sum"][0, 0] async for one in many] == [6 + n for n in range(50)]
        assert await client.servables.is_ready("sums")
        assert (await client.servables.metadata("sums"))["versions"] == ["1", "2"]
        assert any(one["name"] == "echo" for one in await client.servables.index())
        assert (await client.servables.statistics("sums"))[0]["name"] == "sums.both"

    asked(service, way, work)


def test_many_in_flight(client: Client) -> None:
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


def test_refusals_are_the_same_over_both(service: Service) -> None:
    """Status, code and field, whatever was spoken; 0 where nobody is."""
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
    assert servables.metadata("sums", method="both", version="1")["inputs"][0] == {
        "name": "x", "datatype": "FP32", "shape": [-1, 2]
    }  # fmt: skip
    before = servables.statistics("sums", version="2")
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
        with pytest.raises(ServiceError, match="servable") as caught:
            client.servables.load("broken")
        assert (caught.value.status, caught.value.code) == (400, "invalid_model")
    wanted = {"versions": "latest:2", "labels": {"stable": 1}}
    assert methods.changes == [("unload", "zeros", None), ("load", "zeros", wanted)]


@pytest.mark.parametrize("way", ["bytes", "grpc"])
def test_what_takes_too_long_is_refused_and_over(service: Service, way: str) -> None:
    """The service is told, and the client does not wait for longer."""
    gated = method(service, "sums")
    gated.gate = asyncio.Event()
    before = len(gated.seen)
    try:
        with Client(address(service, way)) as client, pytest.raises(ServiceError) as caught:
            client.infer("sums", {"x": X, "y": Y}, timeout_s=0.5)
        assert caught.value.status == 504
        assert len(gated.seen) <= before + 1, "it is asked once"
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
        while len(gated.seen) == before[1]:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    try:
        asked(service, way, work)
        until(lambda: gated.num_cancelled == before[0] + 1)
    finally:
        service.loop.call_soon_threadsafe(gated.gate.set)
        gated.gate = None


def test_language_models(service: Service) -> None:
    with LLM(DEMO) as llm:
        text = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0)).text
    sampling = {"parameters": {"max_tokens": 12, "temperature": 0.0}}
    for way in WAYS:
        with Client(address(service, way), binary=way == "bytes") as client:
            assert client.infer("demo", {"text_input": [PROMPT]}, **sampling)["text_output"].tolist() == [text.encode()]
    with Client(address(service, "grpc")) as client:
        pieces = list(client.stream_infer("demo", {"text_input": [PROMPT]}, **sampling))
        assert b"".join(one["text_output"][0] for one in pieces).decode() == text
        assert len(pieces) > 2
        with pytest.raises(ServiceError) as caught:
            list(client.stream_infer("demo", {"text_input": [PROMPT]}, parameters={"max_tokens": -1}))
        assert (caught.value.status, caught.value.param) == (400, "max_tokens")

    async def work(client: AsyncClient) -> str:
        pieces = client.stream_infer("demo", {"text_input": [PROMPT]}, **sampling)
        return "".join([one["text_output"][0].decode() async for one in pieces])

    assert asked(service, "grpc", work) == text


def test_leaving_the_pieces_ends_the_request(service: Service) -> None:
    with Client(address(service, "grpc")) as client:
        for _ in client.stream_infer("demo", {"text_input": [PROMPT]}, parameters={"ignore_eos": True}):
            break
        until(lambda: service.num_open == 0)


def test_each_address_has_its_routes(service: Service) -> None:
    with Client(address(service, "grpc")) as client, pytest.raises(UnsupportedError, match="http:// address"):
        client.complete("x")
    with Client(service.url) as client, pytest.raises(UnsupportedError, match="stream_complete"):
        client.stream_infer("demo", {"text_input": ["x"]})


@pytest.mark.parametrize("url", ["grpc://localhost", "grpc://localhost:1/v1", "grpcs://:1", "grpc://localhost:1?x"])
def test_addresses_of_grpc_that_are_none(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="url"):
        Client(url)


def test_keys_and_authorities(serve: Any, tmp_path: Any, certificate: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEY + "\n")
    keys.chmod(0o600)
    file, key = certificate
    settings = DoorSettings(grpc_port=0, keys_file=keys, tls_certificate=file, tls_key=key)
    service = serve(settings=settings)
    port = service.grpc_address.rpartition(":")[2]
    inputs, options = {"text_input": ["the cat"]}, {"parameters": {"max_tokens": 2}}
    for url in (f"https://localhost:{service.address[1]}", f"grpcs://localhost:{port}"):
        with Client(url, api_key=KEY, tls_ca=file) as client:
            assert client.infer("fake", inputs, **options)["text_output"].shape == (1,)
        with Client(url, tls_ca=str(file), retries=0) as client, pytest.raises(ServiceError) as caught:
            client.infer("fake", inputs, **options)
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
        with Client(url, api_key=KEY, retries=0) as client, pytest.raises(ServiceError) as caught:
            client.infer("fake", inputs, timeout_s=20)
        assert caught.value.status == 0, "nobody vouches for it"

        async def work(url: str) -> None:
            async with AsyncClient(url, api_key=KEY, tls_ca=file) as client:
                assert await client.servables.is_ready("fake")

        asyncio.run(work(url))
    with pytest.raises(InvalidArgumentError, match="tls_ca"):
        Client("http://localhost", tls_ca=file)
    with pytest.raises(InvalidArgumentError, match="tls_ca"):
        Client("https://localhost", tls_ca=tmp_path / "none").infer("x", {})


@pytest.mark.parametrize("way", ["bytes", "grpc"])
def test_what_may_pass_is_tried_again(serve: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request may be open, and one is: the next is refused until that has ended."""
    monkeypatch.setattr("penstock.serving.client_wire.MAX_PAUSE_S", 0.01)
    service = serve(settings=DoorSettings(grpc_port=0, limits=DoorLimits(num_open=1)))
    service.loop.call_soon_threadsafe(setattr, service.door, "num_open", 1)
    until(lambda: service.num_open == 1)
    inputs, options = {"text_input": ["the cat"]}, {"parameters": {"max_tokens": 2}}
    with Client(address(service, way), retries=100) as client:
        with closing(Client(address(service, way), retries=1)) as hasty, pytest.raises(ServiceError) as caught:
            hasty.infer("fake", inputs, **options)
        assert (caught.value.status, caught.value.code) == (429, "too_many_requests")
        waiting = client.infer_async("fake", inputs, **options)
        service.loop.call_soon_threadsafe(setattr, service.door, "num_open", 0)
        assert waiting.result(SECONDS)["text_output"].shape == (1,)


def test_nobody_there_over_grpc() -> None:
    import socket

    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        with (
            Client(f"grpc://127.0.0.1:{taken.getsockname()[1]}", retries=0) as client,
            pytest.raises(ServiceError) as caught,
        ):
            client.infer("x", {})
    assert caught.value.status == 0
