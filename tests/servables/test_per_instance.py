"""``per_instance_errors``: failed instances are listed, and the others of their request are answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from penstock import Client, ServiceError
from penstock.api_errors import RefusalError
from penstock.errors import DeadlineError, QueueFullError
from penstock.servables.api.manifest import MethodManifest
from penstock.servables.schedule.method_run import MethodGraph
from penstock.servables.schedule.per_instance import wait_for_room
from penstock.tensors import InferResponse, MethodStatistics
from tests.support.errors import raises
from tests.support.http_service import until
from tests.support.servable_folders import Host, arrays, children, request, run, serving, write
from tests.support.serve_command import serving as service
from tests.support.waiting import eventually

FAULTS = """
    servable.settings(timeout_s=600, max_waiting=100)

    def check(x):
        if x == 1: raise servable.InputError("one is not taken")
        if x == 2: raise ValueError("a secret")
        if x == 3: os._exit(7)
        if x == 4: time.sleep(1000)

    @servable.stage(outputs={"y": "FP32[]", "name": "TEXT[2]"})
    def each(x):
        check(x)
        return x, [f"{x:g}", "it"]

    @servable.stage(outputs={"y": "FP32[]", "name": "TEXT[2]"}, batch_size=8)
    def whole(x):
        for one in x: check(one)
        return x, [[f"{one:g}", "it"] for one in x]

    @servable.stage(outputs={"z": "FP32[]"}, batch_size=8)
    def later(y):
        if 5 in y: raise servable.InputError("five is not taken", instance=y.tolist().index(5))
        return y * 2

    @servable.stage(outputs={"all": "INT64[-1]"}, batch_size=8)
    def as_many(z):
        if (z < 0).any(): raise servable.InputError("below zero")
        return np.zeros((len(z), int(z[0])), np.int64)

    @servable.method(inputs={"x": "FP32[]"}, outputs={"z": "FP32[]", "name": "TEXT[2]"})
    def one_by_one(x):
        y, name = each(x)
        return later(y), name

    @servable.method(inputs={"x": "FP32[]"}, outputs={"z": "FP32[]", "name": "TEXT[2]"})
    def together(x):
        y, name = whole(x)
        return later(y), name

    @servable.method(inputs={"x": "FP32[]"}, outputs={"all": "INT64[-1]"})
    def of_sizes(x):
        return as_many(x)
"""
ENDS = {1: (400, "invalid_input"), 2: (500, "stage_failed"), 3: (500, "stage_died"), 5: (400, "invalid_input")}
METHODS = ("one_by_one", "together")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    root = tmp_path_factory.mktemp("servables")
    write(root, "faults", FAULTS)
    write(root, "hangs", FAULTS.replace("timeout_s=600", "timeout_s=2"))
    found = Host(root)
    yield found
    found.close()


def ask(host: Host, method: str, x: Any, **named: Any) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
    name = method if "." in method else f"faults.{method}"
    found = host.do(host.servables.find(name).infer(asked(x, **named)))
    return arrays(found), errors_of(found)


def asked(x: Any, **named: Any) -> Any:
    return request({"x": np.asarray(x, np.float32)}, per_instance_errors=True, **named)


def errors_of(response: InferResponse) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = json.loads(response.parameters["errors"])
    return found


@pytest.mark.parametrize("method", METHODS)
def test_failed_instances_are_listed_others_answered(host: Host, method: str) -> None:
    x = np.arange(20.0, 40.0, dtype=np.float32)
    places = {3: 1, 7: 2, 8: 5, 19: 3}
    for place, fault in places.items():
        x[place] = fault
    statistics = host.servables.find(f"faults.{method}").statistics
    before = (statistics.num_success, statistics.num_inferences, statistics.num_fail)
    found, errors = ask(host, method, x)
    assert [(one["instance"], one["status"], one["code"]) for one in errors] == [
        (place, *ENDS[fault]) for place, fault in sorted(places.items())
    ]
    assert "secret" not in str(errors)
    told = {one["instance"]: one["message"] for one in errors}
    assert "instance 8: five is not taken" in told[8]
    if method == "one_by_one":
        assert all(f"each, instance {place}" in told[place].replace(" failed", "") for place in (3, 7, 19)), told
    for place, one in enumerate(x):
        wanted = (0, [b"", b""]) if place in places else (one * 2, [b"%g" % one, b"it"])
        assert (found["z"][place], found["name"][place].tolist()) == wanted
    after = (statistics.num_success, statistics.num_inferences, statistics.num_fail)
    assert np.subtract(after, before).tolist() == [1, 16, 0]


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_hanging_instance_is_listed(host: Host, method: str) -> None:
    found, errors = ask(host, f"hangs.{method}", [20, 4, 30])
    assert [(one["instance"], one["status"], one["code"]) for one in errors] == [(1, 504, "stage_hung")]
    assert found["z"].tolist() == [40, 0, 60]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("x", [[20.0], [1.0], [1.0, 2.0]])
def test_all_or_none_may_fail(host: Host, method: str, x: list[float]) -> None:
    found, errors = ask(host, method, x)
    assert [one["instance"] for one in errors] == [place for place, one in enumerate(x) if one < 10]
    assert found["z"].tolist() == [one * 2 if one >= 10 else 0 for one in x]
    assert found["name"].shape == (len(x), 2)


def test_more_instances_than_run_at_once(host: Host) -> None:
    x = np.arange(10.0, 810.0)
    x[[0, 400, 799]] = 1
    found, errors = ask(host, "one_by_one", x)
    assert [one["instance"] for one in errors] == [0, 400, 799]
    assert np.array_equal(found["z"], np.where(x < 10, 0, x * 2).astype(np.float32))


def test_rows_of_different_sizes(host: Host) -> None:
    """Who fails has the others' sizes; none at all when all fail; and rows that differ are no tensor."""
    found, errors = ask(host, "of_sizes", [3, -1, 3])
    assert (found["all"].shape, len(errors)) == ((3, 3), 1)
    found, errors = ask(host, "of_sizes", [-1, -2])
    assert (found["all"].shape, len(errors)) == ((2, 0), 2)
    with raises(RefusalError, code="invalid_input", match="different shapes"):
        ask(host, "of_sizes", [3, -1, 4])


def test_other_errors_fail_the_whole_request(host: Host) -> None:
    with raises(DeadlineError, code="deadline_exceeded"):
        ask(host, "hangs.one_by_one", [20, 1, 4], deadline_s=0.3)

    async def beside() -> None:
        """While as many wait as may."""
        method = host.servables.find("faults.one_by_one")
        others = asyncio.ensure_future(method.infer(request({"x": np.full(100, 20.0, np.float32)})))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await method.infer(asked(np.full(100, 20.0)))
        assert len((await others).outputs) == 2

    host.do(beside())


CROWD = """
    servable.settings(max_waiting=8, workers=2, timeout_s=600)

    @servable.stage(outputs={{"y": "FP32[]"}}, batch_size=8)
    def quick(x):
        if len(x) == 8: open({folder!r} + f"/in{{x[0]:g}}", "w").close()
        while not os.path.exists({folder!r} + "/out"): time.sleep(0.005)
        if 1 in x: raise servable.InputError("one is not taken")
        return x

    @servable.stage(outputs={{"z": "FP32[]"}}, batch_size=1)
    def slow(y):
        time.sleep(0.02)
        return y

    @servable.method(inputs={{"x": "FP32[]"}}, outputs={{"z": "FP32[]"}})
    def crowd(x):
        return slow(quick(x))
"""


def test_instances_of_several_requests_wait_for_room(tmp_path: Path) -> None:
    """More instances than may wait: none is refused for that, and the deadline still applies."""
    write(tmp_path / "root", "crowd", CROWD.format(folder=str(tmp_path)))

    async def work() -> None:
        async with serving(tmp_path / "root") as servables:
            method = servables.find("crowd")
            several = []
            for first in (20.0, 40.0):
                x = np.arange(first, first + 8)
                x[3] = 1
                several.append(asyncio.ensure_future(method.infer(asked(x))))
                await eventually(lambda: (tmp_path / f"in{first:g}").exists())  # noqa: B023
            (tmp_path / "out").touch()
            for first, found in zip((20, 40), await asyncio.gather(*several), strict=True):
                assert arrays(found)["z"].tolist() == [0 if n == 3 else first + n for n in range(8)]
                assert [one["instance"] for one in errors_of(found)] == [3]
            assert method.statistics.num_rejected == 0

    run(work)


class Full:
    """A queue that takes nothing until it was asked for its room so often."""

    max_waiting = 1

    def __init__(self, looks: float) -> None:
        self.left = looks

    @property
    def num_waiting(self) -> int:
        self.left -= 1
        return int(self.left > 0)


@pytest.mark.parametrize("seconds", [0.05, 0.0, -1.0])
def test_waiting_for_room_ends(seconds: float) -> None:
    async def work() -> None:
        free, full = Full(3), Full(float("inf"))
        route = MethodGraph(MethodManifest("it", {}, {}, 0, (), (), 0), (), MethodStatistics(), 0)
        route.queues = [free]  # type: ignore[list-item]
        await wait_for_room(route, float("inf"))
        assert free.left == 0
        route.queues = [full]  # type: ignore[list-item]
        await wait_for_room(route, seconds)

    run(work)


def test_cancelling_ends_all_of_it(tmp_path: Path) -> None:
    """Also while its instances are under way one by one: nothing of it waits on or runs on."""
    gate = tmp_path / "gate"
    write(
        tmp_path / "root",
        "slow",
        """
        servable.settings(timeout_s=600)

        @servable.stage(outputs={"y": "FP32[]"}, batch_size=4)
        def wait(x, path):
            if len(x) > 1: raise ValueError("together")
            open(path[0] + "-seen", "a").write(f"{x[0]:g}\\n")
            while not os.path.exists(path[0]): time.sleep(0.005)
            return x

        @servable.method(inputs={"x": "FP32[]", "path": "TEXT[]"}, outputs={"y": "FP32[]"})
        def one(x, path):
            return wait(x, path)
        """,
    )
    seen = Path(f"{gate}-seen")

    async def work() -> None:
        async with serving(tmp_path / "root") as servables:
            method = servables.find("slow")
            given = {"x": np.arange(9, dtype=np.float32), "path": [str(gate)] * 9}
            task = asyncio.ensure_future(method.infer(request(given, per_instance_errors=True)))
            await eventually(lambda: seen.exists() and seen.read_text())
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            gate.touch()
            last = {"x": np.full(1, 20, np.float32), "path": [str(gate)]}
            assert arrays(await method.infer(request(last)))["y"].tolist() == [20]
            assert seen.read_text().split() == ["0", "20"]
            assert (method.statistics.num_cancelled, method.statistics.num_fail) == (1, 0)

    run(work)


def test_over_http_and_grpc(tmp_path: Path) -> None:
    """With Penstock's client and Triton's; without the parameter the whole request fails."""
    write(tmp_path / "root", "faults", FAULTS)
    x = np.array([20, 1, 30], np.float32)
    before = children()
    with service(tmp_path / "root", "--grpc-port", "0", "--log", "warning", cwd=tmp_path) as (_, url, said):
        (line,) = (one for one in said.splitlines() if "gRPC" in one)
        rpc = line.split(" at ")[1].split()[0]
        for address, binary in ((url, True), (url, False), (f"grpc://{rpc}", True)):
            with Client(address, binary=binary) as client:
                asks = {"x": x}
                found = client.infer("faults", asks, method="together", parameters={"per_instance_errors": True})
                assert found["z"].tolist() == [40, 0, 60]
                ((place, error),) = found.errors.items()
                assert (place, error.status, error.code) == (1, 400, "invalid_input")
                assert "instance 1" in str(error) or "whole: one is not taken" in str(error)
                with raises(ServiceError, code="invalid_input", match="one is not taken"):
                    client.infer("faults", asks, method="together", parameters={"per_instance_errors": False})
                with raises(ServiceError, param="per_instance_errors"):
                    client.infer("faults", asks, method="together", parameters={"per_instance_errors": "yes"})
                found = client.infer("faults", {"x": x[:1]}, method="together", version=1)
                assert (found.errors, found.parameters, found.version) == ({}, {}, "1")
        for module, address in ((tritonclient.http, url.removeprefix("http://")), (tritonclient.grpc, rpc)):
            with module.InferenceServerClient(address) as triton:
                tensor = module.InferInput("x", [3], "FP32")
                tensor.set_data_from_numpy(x)
                result = triton.infer("faults.one_by_one", [tensor], parameters={"per_instance_errors": True})
                told = result.get_response()
                told = told["parameters"] if isinstance(told, dict) else told.parameters
                text = told["errors"] if isinstance(told["errors"], str) else told["errors"].string_param
                assert [one["instance"] for one in json.loads(text)] == [1]
                assert result.as_numpy("z").tolist() == [40, 0, 60]
    until(lambda: children() <= before)
