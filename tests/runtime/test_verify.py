"""Damaged weights are refused before anything runs, and a file is read for that once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import LLM, pipeline
from penstock.cli.main import main
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.processes.supervision import Death
from penstock.runtime import verify as verified
from penstock.runtime.cache import Cache
from penstock.runtime.program import ProgramLimits
from penstock.runtime.verify import VERIFY_MODES, open_verified
from penstock.serving.workers.worker_config import WorkerConfig
from penstock.serving.workers.worker_group import WorkerGroup
from tests.support.command import DEMO, FOLDER, environment
from tests.support.errors import raises
from tests.support.waiting import eventually

DAMAGE = r"segments\[0\] \(weights\)"
LIMITS = ProgramLimits(max_tokens=64, max_requests=1, context_len=64)


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(verified, "_SETTLED_NS", -1)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = bytearray(DEMO.read_bytes())
    for at in (len(data) // 3, len(data) // 2, len(data) // 2 + 7):
        data[at] ^= 1
    path = tmp_path_factory.mktemp("damaged") / "damaged.psm"
    path.write_bytes(data)
    return path


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    path = tmp_path / "copy.psm"
    path.write_bytes(DEMO.read_bytes())
    return path


def seconds_of(path: Path, verify: str = "once") -> float:
    model, seconds = open_verified(path, verify)
    model.close()
    return seconds


@pytest.mark.parametrize("verify", ["once", "always"])
def test_damaged_weights_are_refused(verify: str, damaged: Path) -> None:
    with raises(InvalidFileError, param="segments[0]", match=DAMAGE):
        LLM(damaged, limits=LIMITS, verify=verify)
    with raises(InvalidFileError, param="segments[0]", match=DAMAGE):  # it was not remembered
        LLM(damaged, limits=LIMITS, verify=verify)


def test_never_runs_damaged_weights(damaged: Path) -> None:
    with LLM(damaged, limits=LIMITS, verify="never") as llm:
        assert llm.verify_s == 0.0


@pytest.mark.parametrize("backend", ["graph", "lite"])
def test_a_pipeline_refuses_damaged_weights(backend: str, damaged: Path, tmp_path: Path) -> None:
    with raises(InvalidFileError, param="segments[0]", match=DAMAGE):
        pipeline(model=damaged, backend=backend)
    for value, expected in (("true", "always"), ("false", "never")):
        file = tmp_path / f"{value}.ini"
        file.write_text(f"[model]\nverify = {value}\n")
        with pipeline(model=DEMO, backend=backend, config_path=file) as generate:
            assert generate._options.verify == expected
    with pipeline(model=damaged, backend=backend, verify="never") as generate:
        assert generate([1], max_tokens=1, is_sample_acceleration=True, ignore_eos=True).token_ids


@pytest.mark.parametrize(
    "command",
    [
        ["run", "@", "x"],
        ["chat", "@"],
        ["batch", "@", "in.jsonl", "out.jsonl"],
        ["infer", "--model", "@", "x"],
        ["infer", "--model", "@", "--backend", "lite", "x"],
        ["bench", "@", "--batch", "1", "--new-tokens", "1", "--prompt-tokens", "1"],
        ["bench", "@", "--online", "--requests", "1"],
        ["profile", "@"],
    ],
    ids=lambda command: "-".join(one.strip("-") for one in command[::3]),
)
def test_every_command_refuses_damaged_weights(
    command: list[str],
    damaged: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a"}\n')
    assert main([str(damaged) if one == "@" else one for one in command]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"penstock: {damaged}: segments[0] (weights).crc32: expected")


def test_a_service_refuses_damaged_weights(damaged: Path, cache_dir: Path) -> None:
    command = [sys.executable, "-m", "penstock", "serve", str(damaged), "--port", "0"]
    env = environment(PENSTOCK_CACHE_DIR=str(cache_dir))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "segments[0] (weights).crc32" in done.stderr


def test_the_first_worker_and_restarts_verify_a_bundle() -> None:
    modes: list[str] = []

    class Worker:
        def __init__(self, connection: Any, ended: Any, stop: Any) -> None:
            self.connection, self.ended, self.stop = connection, ended, stop

    class Launcher:
        supervision = SimpleNamespace(min_pause_s=0.01, max_pause_s=0.01)

        async def launch(self, config: WorkerConfig, *, is_known: bool = False) -> Any:
            modes.append(config.verify)
            link = SimpleNamespace(
                plan=None, card=None, name="w", node="", pid=1, num_lost=0, max_open=0, state_id="", role=""
            )

            async def ended() -> Any:
                await asyncio.sleep(0.01 if len(modes) <= 3 else 1000)
                return Death("exit", "")

            async def stop() -> None:
                return None

            return Worker(link, ended, stop)

    async def start(path: Path, verify: str) -> list[str]:
        modes.clear()
        config = WorkerConfig("", "", "demo", str(path), verify=verify)
        group = WorkerGroup(Launcher(), config, 3, lambda: None, Counter())  # type: ignore[arg-type]
        await group.start()
        await eventually(lambda: len(modes) >= 6)
        await group.stop()
        return modes[:6]

    assert asyncio.run(start(DEMO, "always")) == ["always"] + ["never"] * 2 + ["always"] * 3
    assert asyncio.run(start(DEMO, "once")) == ["once"] + ["never"] * 2 + ["once"] * 3
    assert asyncio.run(start(FOLDER, "always")) == ["always"] + ["once"] * 2 + ["always"] * 3
    assert asyncio.run(start(FOLDER, "never")) == ["never"] * 6


def test_a_verified_file_is_remembered(copy: Path) -> None:
    assert seconds_of(copy) > 0
    assert seconds_of(copy) == 0
    assert seconds_of(copy, "never") == 0
    assert seconds_of(copy, "always") > 0
    Cache().clear()
    assert seconds_of(copy) > 0


def test_a_changed_file_is_verified_again(copy: Path) -> None:
    assert seconds_of(copy) > 0
    status, data = copy.stat(), bytearray(copy.read_bytes())
    data[len(data) // 2] ^= 1
    copy.write_bytes(data)
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    with raises(InvalidFileError, param="segments[0]", match=DAMAGE):
        open_verified(copy)
    moved = copy.with_name("moved.psm")
    moved.write_bytes(DEMO.read_bytes())
    assert seconds_of(moved) > 0
    moved.replace(copy)
    assert seconds_of(copy) > 0


def test_a_file_that_just_changed_is_not_remembered(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "_SETTLED_NS", 10**12)
    assert seconds_of(copy) > 0
    assert seconds_of(copy) > 0


@pytest.mark.parametrize("place", ["file/cache", "file"])
def test_without_a_cache_folder_each_start_verifies(
    place: str, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / place))
    assert seconds_of(copy) > 0
    assert seconds_of(copy) > 0


def test_records_are_bounded(copy: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "_MAX_RECORDS", 10)
    for number in range(30):
        os.utime(copy, (number, number))
        assert seconds_of(copy) > 0
        assert len(list((cache_dir / "verified").iterdir())) <= 10


@pytest.mark.parametrize("value", ["sometimes", True, None, 1, []])
def test_other_modes_are_refused(value: Any) -> None:
    with raises(InvalidArgumentError, param="verify"):
        LLM(DEMO, verify=value)
    assert VERIFY_MODES == ("once", "always", "never")


def test_eager_mode_has_no_checksums() -> None:
    with raises(UnsupportedError, param="verify"):
        LLM(FOLDER, mode="eager", verify="always")
