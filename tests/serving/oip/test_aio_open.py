"""Requests of Triton's asyncio clients that end early, or stand in one stream: cancelled, late, many, over TLS."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import grpc
import numpy as np
import pytest

from penstock.serving.settings import GatewaySettings
from tests.support.aio_clients import (
    GREEDY,
    LONG,
    PROMPT,
    WAYS,
    come,
    connected,
    is_idle,
    num_running,
    refusal,
    service_of,
    talk,
    tensor,
    version_of,
)

X = np.zeros((1, 2), np.float32)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with service_of(tmp_path_factory.mktemp("service")) as found:
        yield found


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture
def gate(tmp_path):
    """The file that the servable waits for; there at the end, whatever happens."""
    yield tmp_path / "gate"
    (tmp_path / "gate").touch()


def waiting(way: str, number: int, gate: Any) -> list[Any]:
    return [tensor(way, "x", np.array([number])), tensor(way, "gate", [str(gate)])]


def test_tasks_that_are_cancelled(service, way, gate):
    """One that runs and one that waits: both go at once, and the others are answered."""
    version = version_of(service, "waiting")
    (queue,), counts = version.pools[0].queues, version.methods["waited"].statistics
    before = counts.num_cancelled

    async def work(client):
        tasks = []
        for n in range(4):
            tasks.append(asyncio.create_task(client.infer("waiting", waiting(way, n, gate))))
            await come(lambda n=n: (version.num_open, queue.num_waiting) == (n + 1, n))
        tasks[2].cancel()
        await come(lambda: (version.num_open, queue.num_waiting) == (3, 2))
        tasks[0].cancel()
        await come(lambda: (version.num_open, queue.num_waiting) == (2, 2))
        assert (await client.infer("numbers", [tensor(way, "x", X)])).as_numpy("y").shape == (1, 2)
        gate.touch()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(one, asyncio.CancelledError) for one in found] == [True, False, True, False]
        assert [one.as_numpy("y").tolist() for one in found[1::2]] == [[1], [3]]
        assert counts.num_cancelled == before + 2
        (prompt,) = [tensor(way, "text_input", [PROMPT])]
        task = asyncio.create_task(client.infer("demo", [prompt], parameters=LONG))
        await come(lambda: num_running(service) == 1)
        task.cancel()
        await come(lambda: is_idle(service))
        assert await client.is_server_ready()

    talk(service, way, work)


def test_timeouts(service, way, gate):
    """The protocol's, which the service answers, and the client's own; nothing is left of either."""
    short = 0.2

    async def late():
        """With a client that waits for less over REST, or a call that does over gRPC."""
        async with connected(service, way, **({"conn_timeout": short} if way == "http" else {})) as client:
            own = {"client_timeout": short} if way == "grpc" else {}
            await client.infer("waiting", waiting(way, 2, gate), **own)

    async def work(client):
        found = await refusal(way, client.infer("waiting", waiting(way, 1, gate), timeout=50_000))
        assert (found[0], "0.05 s" in found[1]) == ("504", True)
        if way == "http":
            with pytest.raises(TimeoutError):
                await late()
        else:
            assert (await refusal(way, late()))[0] == "504"
        await come(lambda: is_idle(service))
        gate.touch()
        assert (await client.infer("waiting", waiting(way, 3, gate))).as_numpy("y").tolist() == [3]

    talk(service, way, work)


def asked(model: str, inputs: list[Any], request_id: str = "", **parameters: Any) -> dict[str, Any]:
    """A request of a stream, as the client takes it."""
    return {"model_name": model, "inputs": inputs, "request_id": request_id, "parameters": parameters}


def test_a_stream_of_many_requests(service):
    """Of servables and of a language model side by side; what goes wrong with one leaves the others."""
    expected = service.post("/v1/completions", prompt=PROMPT, **GREEDY)["choices"][0]["text"]

    async def requests():
        for n in range(12):
            x, word = np.full((2, 2), n, np.float32), f"word {n}"
            yield asked("numbers", [tensor("grpc", "x", x)], f"x{n}") | {"model_version": ("1", "2")[n % 2]}
            yield asked("numbers.turned", [tensor("grpc", "word", [word])], f"w{n}")
        yield asked("demo", [tensor("grpc", "text_input", [PROMPT])], "text", **GREEDY)
        yield asked("numbers", [tensor("grpc", "x", X[0])], "wrong")
        yield asked("nobody", [tensor("grpc", "x", X)], "nobody")

    async def work(client):
        found, errors, last = {}, [], []
        async for result, error in client.stream_infer(requests()):
            if error is not None:
                errors.append(error.message())
                continue
            response = result.get_response()
            found.setdefault(response.id, []).append(result)
            last += [response.id] * response.parameters["triton_final_response"].bool_param
        assert sorted(last) == sorted(found), "each has one last response"
        text = b"".join(one.as_numpy("text_output")[0] for one in found.pop("text"))
        assert text.decode() == expected
        numbers = {f"x{n}": np.full((2, 2), n * (n % 2 + 1)).tolist() for n in range(12)}
        assert {name: one.as_numpy("y").tolist() for name, (one,) in found.items() if name[0] == "x"} == numbers
        words = {f"w{n}": [f"word {n}"[::-1].encode()] for n in range(12)}
        assert {name: one.as_numpy("back").tolist() for name, (one,) in found.items() if name[0] == "w"} == words
        assert sorted("nobody" in one for one in errors) == [False, True]
        assert any("batch first, got [2]" in one for one in errors)

    talk(service, "grpc", work)


@pytest.mark.parametrize("how", ["cancel", "task", "timeout"])
def test_a_stream_that_ends_early(service, gate, how):
    """Cancelled, left by a task that is cancelled, or out of time: its requests end, wherever they are."""
    version = version_of(service, "waiting")
    (queue,) = version.pools[0].queues

    async def requests(done):
        for n in range(3):
            yield asked("waiting", waiting("grpc", n, gate))
        yield asked("demo", [tensor("grpc", "text_input", [PROMPT])], **LONG)
        await done.wait()

    async def read(stream):
        async for _ in stream:
            pass

    async def work(client):
        done = asyncio.Event()
        stream = client.stream_infer(requests(done), stream_timeout=0.5 if how == "timeout" else None)
        task = asyncio.create_task(read(stream))
        if how != "timeout":
            await come(lambda: (version.num_open, queue.num_waiting, num_running(service)) == (3, 2, 1))
        if how == "timeout":
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await task
            assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            (stream if how == "cancel" else task).cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await come(lambda: is_idle(service))
        gate.touch()
        assert (await client.infer("waiting", waiting("grpc", 3, gate))).as_numpy("y").tolist() == [3]

    talk(service, "grpc", work)


def test_over_tls(serve, certificate, way):
    file, key = certificate
    own = serve(settings=GatewaySettings(grpc_port=0, tls_certificate=file, tls_key=key))
    if way == "grpc":
        options = {"ssl": True, "root_certificates": str(file)}
    else:
        options = {"ssl": True, "ssl_context": ssl.create_default_context(cafile=str(file))}

    async def work(client):
        assert await client.is_server_ready()
        found = await client.infer("fake", [tensor(way, "text_input", ["a"])], parameters={"max_tokens": 2})
        assert found.as_numpy("num_output_tokens").tolist() == [2]

    talk(own, way, work, **options)
