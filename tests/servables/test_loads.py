"""Loads take effect completely or not at all: when one fails, its client disconnects, or the service stops."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidArgumentError, InvalidFileError, NotFoundError, PenstockError, UnavailableError
from penstock.servables.lifecycle.loaded_version import LoadedVersion, wait_until_done
from penstock.servables.lifecycle.open_version import OpenedVersion, VersionSource
from penstock.servables.lifecycle.repository import ServableRepository
from penstock.servables.process.servable_worker import ServableWorker
from tests.support.errors import raises
from tests.support.servable_folders import PATIENCE, ask, children, pids, run, serving, write
from tests.support.worker_processes import until

TEXT = """
    from pathlib import Path

    number = int(servable.version())
    if (servable.folder() / "broken").exists():
        raise ValueError("broken")

    @servable.stage(outputs={"version": "INT64[]"})
    def which(x):
        gate = Path(__file__).parent / "gate"
        while gate.exists():
            (gate / "in").touch()
            time.sleep(0.01)
        return number

    @servable.method(inputs={"x": "FP32[]"}, outputs={"version": "INT64[]"})
    def tell(x):
        return which(x)
"""
HANGS = """
    if (servable.folder() / "hangs").exists():
        (servable.folder() / "in").touch()
        time.sleep(10000)
"""


def served(servables: ServableRepository) -> tuple[list[str], dict[str, int]]:
    (one,) = servables.all()
    return one.ready, one.labels


def states(servables: ServableRepository) -> dict[str, tuple[str, str]]:
    return {one.version: (one.state, one.reason) for one in servables.index()}


async def which(servables: ServableRepository, version: str = "") -> int:
    found = await ask(servables, "one", {"x": [0.0]}, version)
    return int(found["version"][0])


def says(folder: Path, settings: str) -> None:
    """``servable.py`` has these settings from now on."""
    write(folder.parent, "one", TEXT + f"\n    servable.settings({settings})\n", versions=())


def test_failed_load_keeps_versions_and_labels(tmp_path: Path) -> None:
    """Versions, labels, requested options and processes stay, although one new version loaded."""
    folder = write(tmp_path, "one", TEXT, versions=(1, 2))

    async def work() -> None:
        async with serving(tmp_path) as servables:
            await servables.load("one", {"versions": "latest", "labels": {"stable": 1}})
            before, running = served(servables), sorted(pids(servables))
            assert before == (["1", "2"], {"stable": 1})
            for number in (3, 4):
                (folder / str(number)).mkdir()
            (folder / "3" / "broken").touch()
            for change in ({"labels": {"canary": 3}}, {"versions": "all"}, {"labels": {"stable": 4, "canary": 3}}):
                with pytest.raises(PenstockError, match="ValueError: broken"):
                    await servables.load("one", change)
                assert (served(servables), sorted(pids(servables))) == (before, running)
                assert [await which(servables, one) for one in ("", "1", "2", "stable")] == [2, 1, 2, 1]
                assert children() & {*running} == {*running}
                assert states(servables)["3"][1].endswith("ValueError: broken")
                assert states(servables)["4"][0] == "UNAVAILABLE"
                assert servables.find("one").running.policy == {"latest": {"num_versions": 1}}
            (folder / "3" / "broken").unlink()
            await servables.load("one")
            assert served(servables) == (["1", "4"], {"stable": 1}), "what was asked for last, not what failed"

    before = children()
    run(work)
    assert children() <= before


def test_new_files_of_some_versions_fail(tmp_path: Path) -> None:
    """All versions keep running their old files, in the same processes."""
    folder = write(tmp_path, "one", TEXT, versions=(1, 2))

    async def work() -> None:
        async with serving(tmp_path) as servables:
            await servables.load("one", {"versions": "all"})
            running = sorted(pids(servables))
            (folder / "1" / "broken").touch()
            (folder / "2" / "sound").touch()
            with pytest.raises(PenstockError, match="ValueError: broken"):
                await servables.load("one")
            assert sorted(pids(servables)) == running
            assert [await which(servables, one) for one in ("1", "2")] == [1, 2]
            assert {state for state, _ in states(servables).values()} == {"READY"}

    run(work)


def test_load_with_versions_keeps_labels_of_the_file(tmp_path: Path) -> None:
    """And the other way round; what was asked for holds against the file until an unload."""
    folder = write(tmp_path, "one", TEXT, versions=(1, 2))

    async def work() -> None:
        async with serving(tmp_path) as servables:
            await servables.load("one", {"versions": "all"})
            says(folder, 'labels={"stable": 1}')
            await servables.load("one")
            assert served(servables) == (["1", "2"], {"stable": 1})
            says(folder, 'labels={"stable": 2}, versions="2"')
            await servables.load("one")
            assert served(servables) == (["1", "2"], {"stable": 2})
            await servables.unload("one")
            await servables.load("one", {"labels": {"canary": 2}})
            assert served(servables) == (["2"], {"canary": 2})
            says(folder, 'labels={"stable": 2}, versions="1"')
            await servables.load("one")
            assert served(servables) == (["1", "2"], {"canary": 2})

    run(work)


def test_pinned_versions_survive_a_broken_newer_one(tmp_path: Path) -> None:
    """What the file says of labels is asked of a version that is meant to run."""
    folder = write(tmp_path, "one", TEXT, versions=(1,))
    says(folder, 'labels={"stable": 1}')

    async def work() -> None:
        async with serving(tmp_path) as servables:
            (folder / "2").mkdir()
            (folder / "2" / "broken").touch()
            with pytest.raises(PenstockError, match="ValueError: broken"):
                await servables.load("one")
            running = pids(servables)
            for change in ({"versions": "1"}, {}):
                await servables.load("one", change)
                assert (served(servables), pids(servables)) == ((["1"], {"stable": 1}), running)
            with raises(InvalidArgumentError, param="versions", match="version 7"):
                await servables.load("one", {"versions": "1,7"})

    run(work)


@pytest.mark.long
@pytest.mark.parametrize("where", ["import", "start", "close"])
def test_client_of_a_load_disconnects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Wherever the load is then, all that it began is over when that is said, and what ran goes on."""
    folder = write(tmp_path, "one", TEXT + HANGS + '\n    servable.settings(versions="1,2")\n', versions=(1,))

    async def work() -> None:
        async with serving(tmp_path) as servables:
            before, running = served(servables), children()
            for number in (2, 3):  # the newest one tells what the file says, and its process is not needed further
                (folder / str(number)).mkdir()
            loading = asyncio.ensure_future(servables.load("one", {"labels": {"stable": 1}}))
            if where == "import":
                (folder / "2" / "hangs").touch()
                await until((folder / "2" / "in").exists)
                loading.cancel()
            else:
                cut(monkeypatch, where, loading)
            with pytest.raises(asyncio.CancelledError):
                await loading
            assert served(servables) == before
            assert children() <= running  # a process of another test may end meanwhile
            assert states(servables)["2"] == ("UNAVAILABLE", "the load was aborted")
            assert await which(servables) == 1
            with pytest.raises(NotFoundError):
                await which(servables, "stable")
            monkeypatch.undo()
            (folder / "2" / "hangs").unlink(missing_ok=True)
            await servables.load("one")
            assert served(servables) == (["1", "2"], {})

    before = children()
    run(work)
    assert children() <= before


def cut(monkeypatch: pytest.MonkeyPatch, where: str, loading: asyncio.Future[None]) -> None:
    """Cancel twice: when a new version has started, or when the process that only told what the file says ends, and
    while what was begun is undone.
    """
    stop, load, close = LoadedVersion.stop, LoadedVersion.load, OpenedVersion.close

    async def cancelling_stop(version: LoadedVersion) -> None:
        loading.cancel()
        await stop(version)

    async def cancelling_load(opening: OpenedVersion, languages: None = None) -> LoadedVersion:
        found = await load(opening, languages)
        loading.cancel()
        return found

    async def cancelling_close(opening: OpenedVersion) -> None:
        if opening.source.version == "3":
            loading.cancel()
        await close(opening)

    monkeypatch.setattr(LoadedVersion, "stop", cancelling_stop)
    if where == "start":
        monkeypatch.setattr(LoadedVersion, "load", staticmethod(cancelling_load))
    else:
        monkeypatch.setattr(OpenedVersion, "close", cancelling_close)


@pytest.mark.parametrize("end", ["close", "stop"])
def test_service_stops_during_a_load(tmp_path: Path, end: str) -> None:
    """Who asked is told so, nothing is switched any more, and no process is left, however long an import hangs."""
    folder = write(tmp_path, "one", TEXT + HANGS)

    async def work() -> None:
        async with serving(tmp_path) as servables:
            (folder / "2").mkdir()
            (folder / "2" / "hangs").touch()
            loading = [asyncio.ensure_future(servables.load("one")) for _ in range(2)]  # the second one waits
            await until((folder / "2" / "in").exists)
            await getattr(servables, end)()
            assert children() <= before
            for one in loading:
                with pytest.raises(UnavailableError, match="is stopping"):
                    await one
            assert served(servables) == (["1"], {})
            with pytest.raises(UnavailableError, match="is stopping"):
                await servables.load("one")

    before = children()
    run(work)


@pytest.mark.parametrize("fails", ["2", "3"])
def test_service_stops_while_a_load_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """A sound version 3 is ended because of version 2, or one that did not come to its end: it is ended whole."""
    folder = write(tmp_path, "one", TEXT)
    wire, stop, closing = LoadedVersion._connect, LoadedVersion.stop, []

    def failing_wire(version: LoadedVersion, *given: Any) -> None:
        if version.source.version == fails:
            raise InvalidFileError("it fails")
        wire(version, *given)

    async def work() -> None:
        async with serving(tmp_path) as servables:

            async def closing_stop(version: LoadedVersion) -> None:
                if not closing and version.source.version == "3":
                    closing.append(asyncio.ensure_future(servables.close()))
                    await asyncio.sleep(0)
                await stop(version)

            for number in (2, 3):
                (folder / str(number)).mkdir()
            monkeypatch.setattr(LoadedVersion, "_connect", failing_wire)
            monkeypatch.setattr(LoadedVersion, "stop", closing_stop)
            with pytest.raises(PenstockError, match="is stopping"):
                await servables.load("one", {"versions": "all"})
            await closing[0]
            assert children() <= before

    before = children()
    run(work)


def test_a_stop_ends_a_drain(tmp_path: Path) -> None:
    """Even while a request keeps running."""
    write(tmp_path, "one", TEXT)

    async def work() -> None:
        async with serving(tmp_path) as servables:
            version = servables.all()[0].versions[1]
            version.num_open += 1
            draining = asyncio.ensure_future(version.drain(600.0))
            await asyncio.sleep(0)  # it waits
            await version.stop()
            await until(draining.done)

    run(work)


def test_a_stop_ends_versions_that_are_drained(tmp_path: Path) -> None:
    """An old version still has a request when all is to end at once: that is refused, and its processes end, too."""
    folder = write(tmp_path, "one", TEXT)
    gate = folder / "gate"

    async def work() -> None:
        async with serving(tmp_path) as servables:
            gate.mkdir()
            asked = asyncio.ensure_future(which(servables))
            await until((gate / "in").exists)
            (folder / "2").mkdir()
            await servables.load("one")
            closing = asyncio.ensure_future(servables.close())
            await asyncio.sleep(0)
            closing.cancel()  # a second signal
            with pytest.raises(asyncio.CancelledError):
                await closing
            await servables.stop()
            assert children() <= before
            with pytest.raises(UnavailableError, match="being unloaded"):
                await asked

    before = children()
    run(work)


def test_process_of_a_cancelled_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller of stop is cancelled while the process takes long to exit."""
    thread = "\n    threading.Thread(target=time.sleep, args=(10000,)).start()\n"
    folder = write(tmp_path, "one", TEXT + thread)
    script = folder / "servable.py"
    stop, stopped = ServableWorker.stop, []

    async def noted_stop(worker: ServableWorker) -> None:
        stopped.append(worker)
        await stop(worker)

    monkeypatch.setattr(ServableWorker, "stop", noted_stop)

    async def work() -> None:
        source = VersionSource("one", script, script.read_bytes(), "1", folder / "1", tmp_path)
        ending = asyncio.ensure_future((await OpenedVersion.open(source, PATIENCE)).close())
        await until(lambda: stopped)
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        await until(lambda: children() <= before)
        await stopped[0]._process.wait()  # the thread that waited for the process has told the loop

    before = children()
    run(work)


def test_wait_until_done_survives_cancellation() -> None:
    """Whoever is cancelled meanwhile, once or twice; what comes of it concerns nobody."""

    async def work() -> None:
        gate, ended = asyncio.Event(), []

        async def undo() -> None:
            await gate.wait()
            ended.append(1)
            raise ValueError

        waiting = asyncio.ensure_future(wait_until_done(undo()))
        for _ in range(2):
            await asyncio.sleep(0)
            waiting.cancel()
        for _ in range(10):  # turns of the loop, more than a cancellation takes to get through
            await asyncio.sleep(0)
        assert not waiting.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended == [1]
        await wait_until_done(undo())
        assert ended == [1, 1]

    run(work)
