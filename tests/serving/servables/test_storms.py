"""Versions that come and go under the traffic of both doors: nobody fails by it, and each answer is of one version.

``PENSTOCK_CHAOS=n`` repeats the storms n times (``make chaos``); 32 is 1,024 switches, and 1,024 changes by each of 32.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from penstock import Client, ServiceError
from tests.cli.conftest import ROOT
from tests.cli.test_serve import ask, serving
from tests.serving.servables.folders import write
from tests.serving.service import SECONDS, until

CHAOS = int(os.environ.get("PENSTOCK_CHAOS", "1"))
KEY = "an-admin-key-of-theirs"
THREADS = 32

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
"""Two trips to a process, so that a switch may come between them."""


@contextmanager
def service(tmp_path: Path) -> Iterator[tuple[psutil.Process, str, str]]:
    """A service of its own over ``root``: its process and its two addresses."""
    keys = tmp_path / "admins"
    keys.write_text(KEY + "\n")
    keys.chmod(0o600)
    args = [tmp_path / "root", "--grpc-port", "0", "--admin-key-file", keys]
    program = [str(ROOT / "tests" / "serving" / "patient_service.py")]
    with serving(*args, cwd=tmp_path, program=program) as (process, url, said):
        (line,) = (one for one in said.splitlines() if "gRPC" in one)
        yield psutil.Process(process.pid), url, line.split(" at ")[1].split()[0]


def asker(url: str, grpc: str, way: int) -> tuple[Callable[[str], tuple[str, int, int]], Callable[[], None]]:
    """What asks a servable by Triton's clients, which try nothing again, and how to close it."""
    module = (tritonclient.http, tritonclient.grpc)[way % 2]
    options = {"connection_timeout": SECONDS, "network_timeout": SECONDS} if way % 2 == 0 else {}
    client = module.InferenceServerClient((url.removeprefix("http://"), grpc)[way % 2], **options)
    tensor = module.InferInput("x", [1], "FP32")
    tensor.set_data_from_numpy(np.zeros(1, np.float32))
    headers = {"authorization": f"Bearer {KEY}"}

    def one(name: str) -> tuple[str, int, int]:
        result = client.infer(name, [tensor], headers=headers)
        response = result.get_response()
        version = response["model_version"] if way % 2 == 0 else response.model_version
        return version, int(result.as_numpy("first")[0]), int(result.as_numpy("second")[0])

    return one, client.close


class Traffic:
    """Threads that ask without end; ``answers`` by the number of the thread, and what went wrong."""

    def __init__(self, url: str, grpc: str, work: Callable[[Callable[[str], tuple[str, int, int]], int], None]) -> None:
        self.is_over = False
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(url, grpc, work, way)) for way in range(4)]
        for thread in self._threads:
            thread.start()

    def _run(self, url: str, grpc: str, work: Callable[..., None], way: int) -> None:
        one, close = asker(url, grpc, way)
        try:
            while not self.is_over and not self.errors:
                work(one, way)
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


def test_switches_under_traffic_fail_nobody(tmp_path: Path) -> None:
    """No request fails, none is answered by two versions, and nobody sees an older one after a newer one."""
    folder = write(tmp_path / "root", "one", TWICE)
    seen: list[Counter[int]] = [Counter() for _ in range(4)]
    newest = [0] * 4

    def work(one: Callable[[str], tuple[str, int, int]], way: int) -> None:
        version, first, second = one("one")
        assert version == str(first) == str(second)
        assert first >= newest[way]
        newest[way] = first
        seen[way][first] += 1

    switches = THREADS * CHAOS
    with service(tmp_path) as (process, url, grpc), Client(url, api_key=KEY, timeout_s=SECONDS) as admin:
        traffic = Traffic(url, grpc, work)
        try:
            for number in range(2, 2 + switches):
                (folder / f"{number}.tmp").mkdir()
                (folder / f"{number}.tmp").rename(folder / str(number))
                admin.servables.load("one")
                assert not traffic.errors
                if number > 3:
                    (folder / str(number - 2)).rmdir()
            until(lambda: traffic.errors or min(newest) == 1 + switches)
        finally:
            traffic.end()
        until(lambda: len(process.children(recursive=True)) == 1, "the end of old versions' processes")
        assert [one["is_ready"] for one in versions(url) if one["state"] == "READY"] == [True]
    assert len(sum(seen, Counter())) > switches // 2, "each of most versions answered somebody"


def versions(url: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = ask(url, "/status")["servables"][0]["versions"]
    return found


def test_loads_and_unloads_by_many_under_traffic(tmp_path: Path) -> None:
    """Who asks is answered by one version, or told that none is there, and never fails at a servable beside."""
    for name in ("one", "steady"):
        write(tmp_path / "root", name, TWICE, versions=(1, 2))
    ends: list[Counter[str]] = [Counter() for _ in range(4)]

    def work(one: Callable[[str], tuple[str, int, int]], way: int) -> None:
        version, first, second = one("steady")
        assert (version, first, second) == ("2", 2, 2)
        ends[way]["steady"] += 1
        try:
            version, first, second = one("one")
        except InferenceServerException as error:
            if error.status() not in ("503", "StatusCode.UNAVAILABLE"):
                raise
            ends[way]["none"] += 1
        else:
            assert version == str(first) == str(second)
            assert version in "12"
            ends[way]["answered"] += 1

    errors: list[BaseException] = []
    done: Counter[str] = Counter()
    with service(tmp_path) as (process, url, grpc):
        traffic = Traffic(url, grpc, work)
        threads = [threading.Thread(target=change, args=(url, place, done, errors)) for place in range(THREADS)]
        try:
            for one in threads:
                one.start()
            for one in threads:
                one.join()
            if errors:
                raise errors[0]
            with Client(url, api_key=KEY, timeout_s=SECONDS) as admin:
                admin.servables.load("one", versions="latest")
            before = [one["answered"] for one in ends]
            until(lambda: traffic.errors or all(one["answered"] > two for one, two in zip(ends, before, strict=True)))
        finally:
            traffic.end()
        until(lambda: len(process.children(recursive=True)) == 2, "the end of other versions' processes")
    assert sum(done.values()) == THREADS * 32 * CHAOS
    assert done["unload"], done


def change(url: str, place: int, done: Counter[str], errors: list[BaseException]) -> None:
    """Mostly loads, some with other versions and labels; an unload of what is not loaded is told so."""
    random = Random(place)
    try:
        with Client(url, api_key=KEY, timeout_s=SECONDS, retries=0) as admin:
            for _ in range(32 * CHAOS):
                kind = random.choices(("load", "other", "unload"), (58, 40, 2))[0]
                try:
                    if kind == "load":
                        admin.servables.load("one")
                    elif kind == "other":
                        admin.servables.load("one", versions=random.choice(("1", "2", "all")), labels={"stable": 2})
                    else:
                        admin.servables.unload("one")
                except ServiceError as error:
                    if (kind, error.status) != ("unload", 404):
                        raise
                    kind = "missed"
                done[kind] += 1
    except BaseException as error:
        errors.append(error)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = {*psutil.Process().children(recursive=True)}
    yield
    assert {*psutil.Process().children(recursive=True)} <= before
