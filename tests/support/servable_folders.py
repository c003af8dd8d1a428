"""Folders of servables for tests, and a repository that serves them in the test's event loop."""

from __future__ import annotations

import asyncio
import os
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from penstock.processes.supervision import SupervisionPolicy
from penstock.servables.lifecycle.repository import ServableRepository
from penstock.tensors import DTYPES, InferRequest, InferResponse, Tensor
from tests.support.worker_processes import until

PATIENCE = SupervisionPolicy(load_s=600.0, drain_s=600.0, min_pause_s=0.01, max_pause_s=0.05)
HEAD = "import ctypes, os, sys, threading, time\nimport numpy as np\nfrom penstock import servable\n"


def write(root: Path, name: str, text: str, *, versions: tuple[int, ...] = (1,)) -> Path:
    """Write a servable: the common imports, then ``text``, and empty folders of versions."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    for number in versions:
        (folder / str(number)).mkdir(exist_ok=True)
    (folder / "servable.py").write_text(HEAD + textwrap.dedent(text))
    return folder


def children() -> set[int]:
    """Return all child processes, including those of other tests: multiprocessing keeps one."""
    return {one.pid for one in psutil.Process().children(recursive=True)}


@asynccontextmanager
async def serving(
    root: Path, supervision: SupervisionPolicy = PATIENCE, **given: Any
) -> AsyncIterator[ServableRepository]:
    """Load the servables of a folder, and stop them afterwards."""
    servables = ServableRepository(supervision, **given)
    try:
        await servables.open(root)
        yield servables
        await servables.close()
    finally:
        await servables.stop()


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    """Run ``work`` in a new event loop."""

    async def main() -> Any:
        return await work()

    return asyncio.run(main())


def request(given: Mapping[str, Any], **named: Any) -> InferRequest:
    """Return a request with arrays by name: float64 becomes FP32, texts and bytes become BYTES."""
    tensors = {}
    for name, value in given.items():
        array = np.asarray(value)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        if array.dtype.kind in "USO":
            flat = np.empty(array.size, object)
            flat[:] = [one.encode() if isinstance(one, str) else bytes(one) for one in array.reshape(-1).tolist()]
            array = flat.reshape(array.shape)
        datatype = next(one for one, dtype in DTYPES.items() if dtype == array.dtype and one != "BF16")
        tensors[name] = Tensor(name, datatype, array)
    return InferRequest(named.pop("request_id", "r"), tensors, **named)


async def ask(
    servables: ServableRepository, name: str, given: Mapping[str, Any], version: str = "", **named: Any
) -> Any:
    """Return the outputs of a method by name, as arrays."""
    found = servables.find(name, version)
    assert found is not None
    return arrays(await found.infer(request(given, **named)))


def arrays(response: InferResponse) -> dict[str, Any]:
    return {one.name: one.array for one in response.outputs}


def pids(servables: ServableRepository) -> list[int]:
    """Return the ids of all servable workers."""
    return [
        pid
        for one in servables.all()
        for version in one.versions.values()
        for pool in version.pools
        for pid in pool.pids
    ]


def is_gone(pid: int) -> bool:
    """Return True if a process has ended and was reaped."""
    return not os.path.exists(f"/proc/{pid}")


__all__ = ["HEAD", "PATIENCE", "arrays", "ask", "is_gone", "pids", "request", "run", "serving", "until", "write"]


class Host:
    """An event loop with servables; it runs only while a test uses it."""

    def __init__(self, root) -> None:
        self._runner = asyncio.Runner()
        self.servables = ServableRepository(PATIENCE)
        self.do(self.servables.open(root))

    def do(self, work):
        async def outer():
            return await work

        return self._runner.run(outer())

    def ask(self, name: str, **given):
        return self.do(ask(self.servables, name, given))

    def gather(self, name: str, *several):
        async def all_of_them():
            return await asyncio.gather(*(ask(self.servables, name, one) for one in several), return_exceptions=True)

        return self.do(all_of_them())

    def close(self) -> None:
        self.do(self.servables.stop())
        self._runner.close()
