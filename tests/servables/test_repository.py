"""Folders of servables: loaded, switched, labelled, reloaded, unloaded; failures keep what ran before."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from penstock.api_errors import RefusalError, refusal_of
from penstock.errors import InvalidArgumentError, InvalidFileError, NotFoundError, PenstockError, UnavailableError
from penstock.processes.supervision import SupervisionPolicy
from tests.support.errors import raises
from tests.support.servable_folders import PATIENCE, ask, children, pids, request, run, serving, write
from tests.support.worker_processes import until

VERSION = """
    @servable.stage(outputs={"version": "INT64[]", "folder": "TEXT[]"})
    def number(x):
        return int(servable_version), str(servable_folder)

    servable_version, servable_folder = servable.version(), servable.folder()

    @servable.method(inputs={"x": "FP32[]"}, outputs={"version": "INT64[]", "folder": "TEXT[]"})
    def which(x):
        return number(x)
"""
ONE = {"x": np.zeros(1)}


async def which(servables, version: str = "") -> int:
    return (await ask(servables, "one", ONE, version))["version"][0]


def states(servables) -> dict[str, str]:
    return {one.version: one.state for one in servables.index()}


def test_versions_and_labels(tmp_path: Path) -> None:
    """The newest by default; what the policy says; labels move to what is loaded alone."""
    folder = write(tmp_path, "one", VERSION, versions=(1, 2))

    async def work() -> None:
        async with serving(tmp_path) as servables:
            assert await which(servables) == 2
            assert states(servables) == {"1": "UNAVAILABLE", "2": "READY"}
            assert (await ask(servables, "one.which", ONE))["folder"][0] == str(folder / "2").encode()
            with raises(UnavailableError, param="model_version", match="version 1"):
                servables.find("one", "1")
            with raises(NotFoundError, param="model_version", match="'9'"):
                servables.find("one", "9")
            with pytest.raises(NotFoundError, match=r"methods are one\.which"):
                servables.find("one.what")
            assert servables.find("two") is None
            await servables.load("one", {"versions": "all", "labels": {"stable": 1}})
            assert [await which(servables, one) for one in ("", "1", "2", "stable")] == [2, 1, 2, 1]
            assert servables.find("one").versions == ["1", "2"]
            assert servables.find("one").running.policy == {"all": {}}
            assert [one.version for one in servables.list()] == ["1", "2"]
            (folder / "3").mkdir()
            await servables.load("one")
            assert await which(servables) == 3
            await servables.load("one", {"versions": "latest:2", "labels": {"stable": 2}})
            assert await which(servables, "stable") == 2
            for config in ({"version": 1}, {"versions": 1}, {"labels": 1}, {"versions": "x"}, {"labels": {"a": "b"}}):
                with pytest.raises(InvalidArgumentError):
                    await servables.load("one", config)
            for param, config in (
                ("labels", {"versions": "all", "labels": {"stable": 9}}),
                ("versions", {"versions": "2,9"}),
            ):
                with raises(InvalidArgumentError, param=param, match=r"version 9; .*1, 2, 3"):
                    await servables.load("one", config)
            assert servables.find("one").running.policy == {"latest": {"num_versions": 2}}
            for config in ({"versions": "7", "labels": {}}, {"versions": "7"}):
                with raises(InvalidArgumentError, param="versions", match=r"version 7; .* 1, 2, 3$"):
                    await servables.load("one", config)
            assert await which(servables, "stable") == 2
            await servables.unload("one")
            await until(lambda: set(states(servables).values()) == {"UNAVAILABLE"})  # what was drained before, too
            with pytest.raises(UnavailableError, match="not loaded"):
                servables.find("one")
            with pytest.raises(NotFoundError):
                await servables.unload("one")
            with pytest.raises(NotFoundError):
                await servables.load("two")
            write(tmp_path, "two", VERSION)
            await servables.load("two")
            assert servables.find("two").is_ready

    run(work)


BROKEN = {
    "raises": ("x = 1 / 0", r"servable\.py:\d+: ZeroDivisionError"),
    "is no Python": ("def (", r"servable\.py:\d+: "),
    "exits": ("sys.exit(3)", r"SystemExit\(3\)"),
    "dies": ("os._exit(4)", "status 4"),
    "is killed": ("ctypes.string_at(0)", "SIGSEGV"),
    "declares nothing": ("", "declares no method"),
    "declares wrongly": ('servable.settings(workers="x")', r"servable\.py:\d+: workers"),
    "has no model": (
        'm = servable.model("a.onnx", inputs={"x": "FP32[]"}, outputs={"y": "FP32[]"})\n'
        '@servable.method(inputs={"x": "FP32[]"}, outputs={"y": "FP32[]"})\ndef f(x): return m(x)',
        r"a\.onnx",
    ),
}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"labels": {"a b": 1}},
            "labels: a label must start with a letter, followed by letters, digits, _ and -, got 'a b'",
        ),
        ({"labels": {"a": "1"}}, "labels: a: expected a version number, got '1'"),
        ({"labels": {"stable": 5}}, "labels: stable: one has no version 5; it has 1"),
        ({"labels": {"stable": 2}}, "labels: stable: one has no version 2; it has 1; 2: a version must be a folder"),
        ({"labels": [1]}, 'labels: expected a mapping like {"stable": 1}, got [1]'),
        ({"versions": "5"}, "versions 5: one has no version 5; it has 1"),
        ({"versions": "x"}, 'versions: expected "latest", "latest:2", "all" or numbers like "1,3", got \'x\''),
        ({"versions": 5}, 'versions: expected a string like "latest:2", "all" or "1,3", got 5'),
    ],
)
def test_invalid_load_options_are_named(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    (write(tmp_path, "one", VERSION) / "2").write_text("")

    async def work() -> RefusalError:
        async with serving(tmp_path) as servables:
            with pytest.raises(InvalidArgumentError) as caught:
                await servables.load("one", config)
            assert await which(servables) == 1
            return refusal_of(caught.value, "r")

    refused = run(work)
    assert (refused.status, refused.param, str(refused)) == (400, *config, message)


def test_missing_version_is_named_with_its_servable(tmp_path: Path) -> None:
    """The message is the same as for language models."""
    write(tmp_path, "one", VERSION)

    async def work() -> RefusalError:
        async with serving(tmp_path) as servables:
            with pytest.raises(NotFoundError) as caught:
                servables.find("one", "7")
            return refusal_of(caught.value, "r")

    refused = run(work)
    assert (refused.status, refused.param, refused.code) == (404, "model_version", "version_not_found")
    assert str(refused) == "one has no version '7'; it has 1"


def test_removed_servable_cannot_be_loaded(tmp_path: Path) -> None:
    """The error differs from that of an unknown servable: this one is still served."""
    folder = write(tmp_path, "one", VERSION)

    async def work() -> None:
        async with serving(tmp_path) as servables:
            (folder / "servable.py").unlink()
            with pytest.raises(InvalidFileError, match=r"^one: .*servable\.py"):
                await servables.load("one")
            assert await which(servables) == 1

    run(work)


def test_names_taken_by_models_are_refused(tmp_path: Path) -> None:
    """A servable's name is that of all its methods, so no model may begin so, and no servable may take a model's."""
    write(tmp_path, "one", VERSION)
    names = ["two.v1", "ones"]

    async def work() -> None:
        async with serving(tmp_path, others=lambda: names) as servables:
            assert [servables.taken_by(name) for name in ("one", "one.7b", "ones", "two.v1")] == [
                "the servable one", "the servable one", "", ""
            ]  # fmt: skip
            write(tmp_path, "two", VERSION)
            with raises(InvalidArgumentError, param="name", match=r"servable two .* model two\.v1;"):
                await servables.load("two")
            assert servables.find("two") is None
            names.remove("two.v1")
            await servables.load("two")
            assert servables.find("two") is not None
            names.append("two")
        with raises(InvalidArgumentError, param="name", match="model two;"):
            async with serving(tmp_path, others=lambda: names):
                pass

    run(work)


def test_options_that_a_load_omits_stay(tmp_path: Path) -> None:
    """Labels move and the policy of servable.py holds; then the policy changes and the labels hold."""
    folder = write(tmp_path, "one", VERSION, versions=(1, 2, 3))
    settings = '\nservable.settings(versions="all", labels={"stable": 1})\n'
    (folder / "servable.py").write_text((folder / "servable.py").read_text() + settings)

    def ready(servables) -> list[str]:
        return [version for version, state in states(servables).items() if state == "READY"]

    async def work() -> None:
        async with serving(tmp_path) as servables:
            assert await which(servables, "stable") == 1
            await servables.load("one", {"labels": {"stable": 2}})
            assert (ready(servables), await which(servables, "stable")) == (["1", "2", "3"], 2)
            await servables.load("one", {"versions": "latest"})
            await until(lambda: ready(servables) == ["2", "3"])
            assert await which(servables, "stable") == 2
            await servables.load("one", {"labels": {}})
            await until(lambda: ready(servables) == ["3"])
            with pytest.raises(NotFoundError):
                await which(servables, "stable")

    run(work)


def test_failed_load_keeps_the_old_version(tmp_path: Path) -> None:
    """The old version keeps answering, and the index has the reason."""
    folder = write(tmp_path, "one", VERSION)

    async def work() -> None:
        async with serving(tmp_path) as servables:
            before = pids(servables)
            for number, (name, (text, message)) in enumerate(BROKEN.items(), 2):
                (folder / "servable.py").write_text(f"import ctypes, os, sys\nfrom penstock import servable\n{text}\n")
                (folder / str(number)).mkdir()
                with pytest.raises(PenstockError, match=message):
                    await servables.load("one")
                assert await which(servables) == 1, name
                found = {one.version: one for one in servables.index()}[str(number)]
                assert found.state == "UNAVAILABLE"
            assert pids(servables) == before
            write(tmp_path, "one", VERSION)
            await servables.load("one")
            assert await which(servables) == 1 + len(BROKEN)

    run(work)


def test_hanging_import_times_out(tmp_path: Path) -> None:
    before = children()
    write(tmp_path, "one", f"open({str(tmp_path / 'in')!r}, 'w').close(); time.sleep(10000)")

    async def work() -> None:
        with pytest.raises(UnavailableError, match="within 3 s"):
            async with serving(tmp_path, SupervisionPolicy(load_s=3.0)):
                pass
        loading = asyncio.ensure_future(serving(tmp_path, PATIENCE).__aenter__())
        (tmp_path / "in").unlink(missing_ok=True)
        await until((tmp_path / "in").exists)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading

    run(work)
    assert children() <= before


def test_method_found_before_a_switch_works_after_it(tmp_path: Path) -> None:
    """Between finding a method and asking it, a gateway may read a body for long."""
    folder = write(tmp_path, "one", VERSION)

    async def work() -> None:
        async with serving(tmp_path) as servables:
            newest, first = servables.find("one"), servables.find("one", "1")
            (folder / "2").mkdir()
            await servables.load("one")
            await until(lambda: states(servables)["1"] == "UNAVAILABLE")
            assert (await newest.infer(request(ONE))).version == "2"
            with raises(UnavailableError, param="model_version", match="version 1"):
                await first.infer(request(ONE))

    run(work)


def test_no_resources_leak(tmp_path: Path) -> None:
    """No process, descriptor or file, after unloads, after reloads side by side and at the end."""
    folder = write(tmp_path, "one", VERSION)
    (folder / "servable.py").write_text((folder / "servable.py").read_text() + "\nservable.settings(workers=2)\n")
    own, others = psutil.Process(), children()

    async def work() -> None:
        async with serving(tmp_path) as servables:
            before, loaded = own.num_fds(), len(children() - others)
            assert loaded == 2
            for _ in range(2):
                await servables.unload("one")
                assert children() <= others
                await asyncio.gather(*(servables.load("one") for _ in range(4)))
                assert await which(servables) == 1
            await until(lambda: own.num_fds() <= before)
            assert len(children() - others) == loaded
            dying = asyncio.ensure_future(servables.unload("one"))
            await asyncio.sleep(0)
            dying.cancel()

    first = own.num_fds()
    run(work)
    assert children() <= others
    assert own.num_fds() == first
