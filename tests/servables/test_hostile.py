"""Servables that misbehave without raising: other requests are answered, and no resources leak."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from penstock.api_errors import RefusalError
from penstock.errors import InvalidFileError, UnavailableError
from tests.support.marks import mostly_long
from tests.support.servable_folders import Host, ask, children, pids, request, run, serving, until, write

PLACE = """
    at_first = servable.version(), str(servable.folder())
    told = []
    def look(): told.append(servable.version())

    @servable.stage(outputs={"version": "INT64[]", "folder": "TEXT[]"})
    def single(x):
        return int(servable.version()), str(servable.folder())

    @servable.stage(outputs={"many": "INT64[]"}, batch_size=4)
    def batch(version):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        child = os.fork()
        if not child:
            os._exit(int(servable.version()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == int(servable.version())
        return np.full(len(version), int(told.pop()))

    @servable.method(inputs={"x": "FP32[]"}, outputs={"version": "INT64[]", "folder": "TEXT[]", "many": "INT64[]"})
    def where(x):
        assert (servable.version(), str(servable.folder())) == at_first
        version, folder = single(x)
        return version, folder, batch(version)
"""


def test_stages_know_their_version_and_folder(tmp_path: Path) -> None:
    """In a stage, in a batch, in a thread and in a child that they start; each version its own."""
    folder = write(tmp_path, "place", PLACE, versions=(1, 3))

    async def work() -> None:
        async with serving(tmp_path) as servables:
            await servables.load("place", {"versions": "all"})
            for number in (1, 3, 1):
                found = await ask(servables, "place", {"x": np.array([1.0])}, str(number))
                assert [int(found["version"][0]), int(found["many"][0])] == [number, number]
                assert found["folder"][0].decode() == str(folder / str(number))

    run(work)


def test_load_errors_have_relative_paths(tmp_path: Path) -> None:
    """The answer to a load, what a version's state says and what requests are told name no folder of the machine."""
    root = tmp_path / "their root"
    write(root, "place", PLACE)

    async def work() -> None:
        async with serving(root) as servables:
            write(root, "place", 'open("/no/such/folder/file.txt")', versions=(1, 2))
            with pytest.raises(InvalidFileError) as told:
                await servables.load("place")
            assert "place/servable.py:4: FileNotFoundError" in str(told.value)
            assert "file.txt" in str(told.value)
            reasons = [one.reason for one in servables.index()]
            for text in (str(told.value), *reasons):
                assert str(tmp_path) not in text
                assert "their root" not in text
                assert "/no/such" not in text
            assert any("place/servable.py:4" in one for one in reasons)

    run(work)


ODD = """
    servable.settings(workers={workers}, timeout_s={timeout_s})
    kept = []

    def hostile():
        {body}

    @servable.stage(outputs={{"y": "FP32[3]"}})
    def echo(x):
        if x[0] < 0:
            found = hostile()
            return x if found is None else found
        return x

    @servable.method(inputs={{"x": "FP32[3]"}}, outputs={{"y": "FP32[3]"}})
    def run(x):
        return echo(x)
"""
HARMLESS = {
    "threads that go on": "threading.Thread(target=time.sleep, args=(1000,)).start()",
    "threads that spin": "threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()",
    "much on standard output": "os.write(1, b'x' * 100_000 + b'\\n')",
    "much on standard error": "os.write(2, b'x' * 100_000 + b'\\n')",
    "closed standard streams": "[os.close(n) for n in (0, 1, 2) if not kept]; kept.append(1)",
    "signals that are ignored": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "a child that waits": "os.fork() or time.sleep(1000)",
    "a child that waits in a session": "os.fork() or (os.setsid(), time.sleep(1000))",
    "a daemon": "os.fork() or (os.setsid(), os.fork() and os._exit(0), time.sleep(1000))",
    "a program in a session": "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)",
    "a program": "import subprocess; subprocess.Popen(['sleep', '1000'])",
    "no threads for others": "sys.setswitchinterval(10)",
    "another folder": "os.chdir('/')",
    "frozen collections": "import gc; gc.disable(); gc.freeze()",
}
REFUSED = {
    "a generator": ("return (one for one in range(3))", {"stage_failed"}),
    "a stop": ("raise StopIteration", {"stage_failed"}),
    "deep recursion": ("return hostile()", {"stage_failed", "stage_died"}),
    "interrupt": ("raise KeyboardInterrupt", {"stage_died"}),
    "the end": ("os._exit(0)", {"stage_died"}),
    "a signal": ("os.kill(os.getpid(), 9)", {"unavailable"}),  # it may come from outside
    "an alarm": ("import signal; signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(1000)", {"stage_died"}),
    "a fault": ("ctypes.string_at(0)", {"stage_died"}),
    "stopped": ("os.kill(os.getpid(), 19)", {"stage_hung"}),
    "an exit beside": ("threading.Timer(0.01, os._exit, (3,)).start(); time.sleep(1000)", {"stage_died"}),
    "the parent ends": ("os.fork() and os._exit(0); time.sleep(0.05)", {"stage_died"}),
}


def mark_of(process: psutil.Process) -> str | None:
    """What all that a servable worker started has in its environment."""
    with suppress(psutil.Error):
        return process.environ().get("_PENSTOCK_STAGE")
    return None


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator:
    made: list[Host] = []
    before = children()

    def make(body: str, timeout_s: float = 60) -> Host:
        write(tmp_path / "root", "odd", ODD.format(body=body, workers=2, timeout_s=timeout_s))
        made.append(Host(tmp_path / "root"))
        return made[0]

    yield make
    for one in made:
        marks = {psutil.Process(pid).environ()["_PENSTOCK_STAGE"] for pid in pids(one.servables)}
        started = [process for process in psutil.process_iter() if mark_of(process) in marks]
        assert len(started) >= 2
        one.close()
        _, alive = psutil.wait_procs(started, timeout=300)
        assert not alive
    assert children() <= before


def answers(host: Host, count: int = 60) -> tuple[list[bool], list[Exception], list[Exception]]:
    """Whether each answer is right, and the refusals of the hostile requests and of the others."""

    async def one(number: int) -> Any:
        values = np.full((1, 3), -number if number % 10 == 0 else number, np.float32)
        await asyncio.sleep(number * 0.003)
        try:
            (tensor,) = (await host.servables.find("odd").infer(request({"x": values}))).outputs
        except (RefusalError, UnavailableError) as error:
            return error
        return tensor.array.tolist() == values.tolist()

    async def storm() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*(one(number) for number in range(1, count + 1))), 240)

    found = dict(enumerate(host.do(storm()), 1))
    hostile = [one for number, one in found.items() if number % 10 == 0 and isinstance(one, Exception)]
    others = [one for number, one in found.items() if number % 10 and isinstance(one, Exception)]
    return [one for one in found.values() if isinstance(one, bool)], hostile, others


@pytest.mark.parametrize("how", mostly_long(HARMLESS, *list(HARMLESS)[::4]))
def test_leftovers_of_a_stage_are_harmless(hosts, how: str) -> None:
    assert answers(hosts(HARMLESS[how])) == ([True] * 60, [], [])


@pytest.mark.parametrize("how", mostly_long(REFUSED, *list(REFUSED)[::3]))
def test_only_the_hostile_request_is_refused(hosts, how: str) -> None:
    body, codes = REFUSED[how]
    host = hosts(body, timeout_s=2 if codes == {"stage_hung"} else 60)
    right, hostile, others = answers(host, 30)
    assert (right, others) == ([True] * 27, [])
    assert len(hostile) == 3
    assert {getattr(one, "code", "") for one in hostile} <= codes
    host.do(until(lambda: len(pids(host.servables)) == 2))
