"""A network script that opens its own model at the top level starts one export, not an endless chain of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.models.network_script import run_network_script
from penstock.runtime.build import build_in_child
from penstock.runtime.cache import Cache
from tests.support.command import environment
from tests.support.errors import raises

pytestmark = pytest.mark.usefixtures("cold_exports")

NETWORK = (Path(__file__).parents[2] / "examples" / "my_network.py").read_text()
CONFIG = {"model_type": "mine", "vocab_size": 32, "max_position_embeddings": 32, "width": 16}
CONFIG |= {"num_layers": 1, "num_heads": 1}
MAX_PROCESSES = 4
IMPORTS = """
import asyncio, json, sys
import penstock
from penstock import LLM, AsyncLLM, ProgramLimits, SamplingParams, register_network

FOLDER = sys.argv[1] if len(sys.argv) == 2 else "@FOLDER@"
PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
def show(result):
    print(json.dumps(result.token_ids))
"""
REGISTER = 'register_network("mine", Net)\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from penstock.config import ConfigReader
    from penstock.models.registry import load_network_script

    script = tmp_path_factory.mktemp("script") / "net.py"
    script.write_text(NETWORK)
    definition = load_network_script(f"{script}:Net")
    network = definition.Network(definition.Config.read(ConfigReader(CONFIG)))
    random = np.random.default_rng(0)
    tensors = {
        name: random.standard_normal(tuple(parameter.shape)).astype(np.float32)
        for name, parameter in network.named_parameters()
    }
    folder = tmp_path_factory.mktemp("mine")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
    return folder


def marked(mark: str) -> list[int]:
    """The processes that have ``mark`` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def run_limited(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command whose whole tree of processes is killed as soon as it has more than MAX_PROCESSES."""
    mark = f"PENSTOCK_TEST_MARK={uuid.uuid4().hex}"
    env = environment(PENSTOCK_CACHE_DIR=str(folder / "cache")) | dict([mark.split("=")])
    outputs = [folder / "stdout", folder / "stderr"]
    with outputs[0].open("w") as stdout, outputs[1].open("w") as stderr:
        process = subprocess.Popen(
            command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
        )
        most = 1
        try:
            while process.poll() is None and most <= MAX_PROCESSES:
                most = max(most, len(marked(mark)))
                time.sleep(0.05)
        finally:
            while alive := marked(mark):
                for pid in alive:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
                time.sleep(0.01)
            process.wait()
    assert most <= MAX_PROCESSES, f"{most} processes"
    return subprocess.CompletedProcess(command, process.returncode, *(path.read_text() for path in outputs))


def run_script(text: str, folder: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(text.replace("@FOLDER@", str(folder)))
    return run_limited([sys.executable, str(script)], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "body",
    [
        REGISTER + "with LLM(FOLDER) as llm: show(llm.generate([1, 2, 3], PARAMS))",
        REGISTER + "with LLM(FOLDER, use_cache=False) as llm: show(llm.generate([1, 2, 3], PARAMS))",
        "with LLM(FOLDER, network=f'{__file__}:Net', mode='eager') as llm: show(llm.generate([1, 2, 3], PARAMS))",
        REGISTER
        + "async def main():\n"
        + "    llm = AsyncLLM(await asyncio.to_thread(LLM, FOLDER))\n"
        + "    show(await llm.generate([1, 2, 3], PARAMS))\n"
        + "    await llm.close()\n"
        + "asyncio.run(main())",
        "penstock.export(FOLDER, 'out.psm', network=f'{__file__}:Net')\n"
        + "with LLM('out.psm') as llm: show(llm.generate([1, 2, 3], PARAMS))",
    ],
    ids=["registered", "without-cache", "eager", "async", "export"],
)
def test_a_script_without_guard_runs(body: str, folder: Path, tmp_path: Path) -> None:
    done = run_script(NETWORK + IMPORTS + body, folder, tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert len(json.loads(line)) == 3


@pytest.mark.long
def test_a_broken_script_is_one_line(folder: Path, tmp_path: Path) -> None:
    done = run_script(IMPORTS + "LLM(FOLDER, network=f'{__file__}:Net')\n" + NETWORK, folder, tmp_path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "script.py opens a model before it defines Net" in last
    assert 'if __name__ == "__main__":' in last


@pytest.mark.parametrize(
    "body",
    [
        "open_model()",
        "try:\n    open_model()\nexcept Exception:\n    raise SystemError('not stopped')",
        "try:\n    model = open_model()\nfinally:\n    model.close()",
        "import sys\nsys.exit(open_model())",
        "import argparse\nargparse.ArgumentParser().add_argument('folder', choices=['x'])\nraise SystemExit(2)",
    ],
    ids=["plain", "except", "finally", "exit", "arguments"],
)
def test_an_import_stops_at_a_nested_export(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_EXPORT_CHILD", "1")
    script = tmp_path / "stops.py"
    opening = "from penstock.runtime.cache import Cache\ndef open_model():\n    Cache().find_or_build('.')\n"
    script.write_text(f"{opening}class Net: ...\n{body}\nclass Later: ...\n")
    module = run_network_script(script, "Net")
    assert hasattr(module, "Net")
    assert not hasattr(module, "Later")
    with raises(InvalidArgumentError, param="network", match="defines Later; .*`if __name__"):
        run_network_script(script, "Later")


def test_a_process_of_an_export_starts_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_EXPORT_CHILD", "1")
    with pytest.raises(UnsupportedError, match="under `if __name__"):
        Cache(tmp_path / "cache").find_or_build(tmp_path)
    with pytest.raises(UnsupportedError, match="under `if __name__"):
        build_in_child(tmp_path, tmp_path / "out.psm")


def test_other_errors_of_a_script_name_its_line(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("class Net: ...\nraise ZeroDivisionError('mine')\n")
    with pytest.raises(InvalidFileError, match=r"fails\.py:2: ZeroDivisionError: mine$") as raised:
        run_network_script(script, "Net")
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
