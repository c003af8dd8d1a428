"""Services whose servables are loaded and unloaded under traffic."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.support.command import ROOT
from tests.support.http_service import SECONDS
from tests.support.serve_command import serving

CHAOS = int(os.environ.get("PENSTOCK_CHAOS", "1"))
KEY = "an-admin-key-of-theirs"

Answer = tuple[Any, ...]
"""The version that answered, and the versions that its steps report."""
Ask = Callable[..., Answer]
"""Called with the name of a servable, and optionally a version."""


class NotLoadedError(Exception):
    """Raised with the message of a request that was refused because nothing is loaded."""


TWICE = """
    number = int(servable.version())
    servable.settings(timeout_s=3600)

    @servable.stage(outputs={"first": "INT64[]"})
    def before(x):
        return number

    @servable.stage(outputs={"second": "INT64[]"}, batch_size=4)
    def after(first):
        return np.full(len(first), number)

    @servable.method(inputs={"x": "FP32[]"}, outputs={"first": "INT64[]", "second": "INT64[]"})
    def which(x):
        first = before(x)
        return first, after(first)
"""
"""Two trips to a process, so that a switch may happen between them."""


@contextmanager
def service(tmp_path: Path, *more: str) -> Iterator[tuple[psutil.Process, str, str]]:
    """Start a service for ``root``; yield its process and its two addresses."""
    keys = tmp_path / "admins"
    keys.write_text(KEY + "\n")
    keys.chmod(0o600)
    args = [tmp_path / "root", "--grpc-port", "0", "--admin-key-file", keys, *more]
    program = [str(ROOT / "tests" / "support" / "patient_service.py")]
    with serving(*args, cwd=tmp_path, program=program) as (process, url, said):
        (line,) = (one for one in said.splitlines() if "gRPC" in one)
        yield psutil.Process(process.pid), url, line.split(" at ")[1].split()[0]


def asker(url: str, grpc: str, way: int) -> tuple[Ask, Callable[[], None]]:
    """Return a function that calls a servable with Triton's clients, which do not retry, and one that closes it."""
    module = (tritonclient.http, tritonclient.grpc)[way % 2]
    options = {"connection_timeout": SECONDS, "network_timeout": SECONDS} if way % 2 == 0 else {}
    client = module.InferenceServerClient((url.removeprefix("http://"), grpc)[way % 2], **options)
    tensor = module.InferInput("x", [1], "FP32")
    tensor.set_data_from_numpy(np.zeros(1, np.float32))
    headers = {"authorization": f"Bearer {KEY}"}

    def one(name: str, version: str = "") -> Answer:
        try:
            result = client.infer(name, [tensor], model_version=version, headers=headers)
        except InferenceServerException as error:
            if error.status() not in ("503", "StatusCode.UNAVAILABLE"):
                raise
            raise NotLoadedError(error.message()) from error
        response = result.get_response()
        if way % 2 == 0:
            names, version = [one["name"] for one in response["outputs"]], response["model_version"]
        else:
            names, version = [one.name for one in response.outputs], response.model_version
        return version, *(result.as_numpy(name)[0] for name in names)

    return one, client.close


class Traffic:
    """Threads that send requests until ``end``; ``errors`` has what went wrong."""

    def __init__(self, url: str, grpc: str, work: Callable[[Ask, int], None]) -> None:
        self.is_over = False
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(url, grpc, work, way)) for way in range(4)]
        for thread in self._threads:
            thread.start()

    def _run(self, url: str, grpc: str, work: Callable[..., None], way: int) -> None:
        one, close = asker(url, grpc, way)
        try:
            while not self.is_over and not self.errors:
                began = time.monotonic()
                work(one, way)
                time.sleep(min(0.1, time.monotonic() - began))  # the other half is for who starts processes
        except BaseException as error:
            error.add_note(f"at {time.strftime('%H:%M:%S')}")
            self.errors.append(error)
        finally:
            close()

    def end(self) -> None:
        self.is_over = True
        for thread in self._threads:
            thread.join()
        if self.errors:
            raise self.errors[0]


def told_by(one: Ask, name: str, version: str = "") -> tuple[Answer, str]:
    """Return an answer, or the message of a request that was refused because nothing is loaded."""
    try:
        return one(name, version), ""
    except NotLoadedError as error:
        return (), str(error)
