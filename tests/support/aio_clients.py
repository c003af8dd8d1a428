"""Triton's asyncio clients, over REST and gRPC as one, and a service of servables and a language model for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as over_grpc
import tritonclient.http.aio as over_http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from penstock.llm.llm import LLM
from penstock.servables.lifecycle.repository import ServableRepository
from penstock.serving.settings import GatewaySettings
from tests.support.command import DEMO
from tests.support.http_service import KEY, SECONDS, Service, until
from tests.support.servable_folders import PATIENCE, write

NUMBERS = """
    number = int(servable.version())
    servable.settings(versions="all", labels={"stable": 1}, default_method="scale")

    @servable.stage(outputs={"y": "FP32[2]"}, batch_size=8, preferred_sizes=(4,), max_delay_ms=1)
    def times(x):
        return x * number

    @servable.stage(outputs={"back": "BYTES[]", "part": "INT64[]"})
    def turn(word):
        if not word: raise servable.InputError("a word is expected")
        return word[::-1], 10 // len(word.strip(b" "))

    @servable.method(inputs={"x": "FP32[2]"}, outputs={"y": "FP32[2]"})
    def scale(x):
        return times(x)

    @servable.method(inputs={"word": "BYTES[]"}, outputs={"back": "BYTES[]", "part": "INT64[]"})
    def turned(word):
        return turn(word)
"""
"""Version 1 gives x, version 2 gives 2 x."""
WAITING = """
    servable.settings(timeout_s=3600)

    @servable.stage(outputs={"y": "INT64[]"})
    def wait(x, gate):
        while not os.path.exists(gate): time.sleep(0.005)
        return x

    @servable.method(inputs={"x": "INT64[]", "gate": "TEXT[]"}, outputs={"y": "INT64[]"})
    def waited(x, gate):
        return wait(x, gate)
"""
"""Of one process, which is at work until there is a file."""
SPARE = """
    @servable.stage(outputs={"y": "INT64[]"})
    def one(x):
        return 1

    @servable.method(inputs={"x": "INT64[]"}, outputs={"y": "INT64[]"})
    def count(x):
        return one(x)
"""
WAYS = {"http": over_http, "grpc": over_grpc}
ADMIN = {"authorization": f"Bearer {KEY}"}
PROMPT, GREEDY = "def add(a, b):", {"max_tokens": 12, "temperature": 0.0}
LONG = {"max_tokens": 1000, "ignore_eos": True}
CODES = {"400": "INVALID_ARGUMENT", "403": "PERMISSION_DENIED", "404": "NOT_FOUND", "500": "INTERNAL",
         "504": "DEADLINE_EXCEEDED"}  # fmt: skip


@contextmanager
def service_of(folder: Path) -> Iterator[Service]:
    """``numbers`` in two versions, ``waiting`` and ``spare``, beside the demo's model; KEY is an admin's."""
    root, admins = folder / "servables", folder / "admins"
    admins.write_text(KEY + "\n")
    admins.chmod(0o600)
    write(root, "numbers", NUMBERS, versions=(1, 2))
    write(root, "waiting", WAITING)
    write(root, "spare", SPARE)
    servables = ServableRepository(PATIENCE)
    found = Service({"demo": LLM(DEMO)}, GatewaySettings(grpc_port=0, admin_keys_file=admins), methods=servables)
    try:
        found.do(servables.open(root))
        yield found
        found.do(servables.close())
    finally:
        found.do(servables.stop())
        found.close()


@asynccontextmanager
async def connected(service: Service, way: str, **options: Any) -> AsyncIterator[Any]:
    """A client; all that is asked with it may take as long as a machine stands still."""
    if way == "grpc":
        address = service.grpc_address
    else:
        address = service.url.partition("://")[2]
        options = {"conn_timeout": SECONDS, **options}
    async with WAYS[way].InferenceServerClient(address, **options) as client:
        yield client


def talk(service: Service, way: str, work: Callable[[Any], Any], **options: Any) -> Any:
    """What a coroutine gives that talks with a client."""

    async def main() -> Any:
        async with connected(service, way, **options) as client:
            return await work(client)

    return asyncio.run(main())


def tensor(way: str, name: str, values: Any, binary: bool = True) -> Any:
    """An input: lists of numbers are FP32, others BYTES; over REST as bytes or as JSON."""
    array = np.asarray(values)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    if array.dtype.kind in "US":
        array = array.astype(object)
    found = WAYS[way].InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    found.set_data_from_numpy(array, **({} if way == "grpc" else {"binary_data": binary}))
    return found


def as_json(way: str) -> dict[str, Any]:
    """What makes an answer over gRPC the same dictionary as over REST."""
    return {"as_json": True} if way == "grpc" else {}


def plain(found: Any) -> Any:
    """The same without what protobuf's JSON has otherwise: large integers are texts there."""
    if isinstance(found, dict):
        return {name: plain(one) for name, one in found.items()}
    if isinstance(found, list):
        return [plain(one) for one in found]
    return int(found) if isinstance(found, str) and found.lstrip("-").isdigit() else found


async def come(condition: Callable[[], Any]) -> None:
    """Wait for what the service does, and let this loop's clients send meanwhile."""
    await asyncio.to_thread(until, condition)


async def refusal(way: str, work: Any) -> tuple[str, str]:
    """Status, as REST has it, and text of the exception that a call raises."""
    with pytest.raises(InferenceServerException) as error:
        await work
    status = error.value.status()
    if way == "grpc":
        status = next(one for one, code in CODES.items() if f"StatusCode.{code}" == status)
    return status, error.value.message()


def version_of(service: Service, name: str, number: int = 1) -> Any:
    return next(one for one in service.methods.all() if one.name == name).versions[number]


def is_idle(service: Service) -> bool:
    """Whether nothing is at work, at the gateway, in the queues of servables or in the engine."""
    (waiting,) = version_of(service, "waiting").pools[0].queues
    open_there = sum(version_of(service, *one).num_open for one in (("waiting",), ("numbers", 1), ("numbers", 2)))
    return not (service.num_open or open_there or waiting.num_waiting or num_running(service))


def num_running(service: Service) -> int:
    return service.models.list()[0].figures().num_running
