"""``PenstockPredictor``, the class for ``ray.data``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from penstock import LLM, SamplingParams
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError
from penstock.offline.block_checkpoints import BlockCheckpoints
from penstock.offline.predictor import PenstockPredictor
from tests.support.command import DEMO, environment
from tests.support.errors import raises
from tests.support.ray_cluster import skip_reason
from tests.support.waiting import until

PROMPTS = ["import os\n", "def add(a, b):", "x = [1, 2", "class A:"]
SAMPLING = {"max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def answers() -> list[str]:
    with LLM(DEMO) as llm:
        return [result.text for result in llm.generate(PROMPTS, SamplingParams(**SAMPLING))]


def test_a_block_gets_a_column_of_answers(answers) -> None:
    predictor = PenstockPredictor(str(DEMO), prompt_column="text", options={"threads": 1}, sampling=SAMPLING)
    try:
        ids = np.arange(4)
        block = predictor({"id": ids, "text": np.array(PROMPTS, dtype=object)})
        assert [*block] == ["id", "text", "answer"]
        assert [*block["answer"]] == answers
        assert block["id"] is ids
        parts = [predictor({"text": np.array([prompt], dtype=object)})["answer"][0] for prompt in PROMPTS]
        assert parts == answers, "answers do not depend on the blocks"
        assert predictor({"text": np.array([], dtype=object)})["answer"].shape == (0,)
        with raises(InvalidArgumentError, param="prompt_column"):
            predictor({"id": ids})
    finally:
        predictor.close()


def block_of(*prompts: str) -> dict[str, np.ndarray]:
    return {"prompt": np.array(prompts, dtype=object)}


def test_an_answered_block_is_read_again(answers, tmp_path: Path) -> None:
    """By a copy of the bundle, too, but not with another sampling."""
    folder, computed = tmp_path / "new" / "checkpoint", []
    model = shutil.copy(DEMO, tmp_path / "copy.psm")

    def predictor(model: Path, sampling: dict[str, object]) -> PenstockPredictor:
        made = PenstockPredictor(str(model), options={"threads": 1}, sampling=sampling, checkpoint=str(folder))
        generate = made._llm.generate
        made._llm.generate = lambda prompts, params: computed.append(prompts) or generate(prompts, params)
        return made

    def answers_of(model: Path, sampling: dict[str, object], *prompts: str) -> list[str]:
        made = predictor(model, sampling)
        try:
            return [*made(block_of(*prompts))["answer"]]
        finally:
            made.close()

    assert answers_of(DEMO, SAMPLING, *PROMPTS) == answers
    assert answers_of(model, SAMPLING, *PROMPTS) == answers
    assert computed == [PROMPTS]
    assert len(answers_of(DEMO, SAMPLING | {"max_tokens": 2}, *PROMPTS)) == 4
    assert answers_of(DEMO, SAMPLING, *PROMPTS[:2]) == answers[:2]
    assert computed == [PROMPTS, PROMPTS, PROMPTS[:2]]
    assert sorted(path.suffix for path in folder.iterdir()) == [".json"] * 3


@pytest.mark.parametrize("text", ["[", "{}", '["a"]', '["a", 1]'])
def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    checkpoints = BlockCheckpoints(tmp_path, "facts")
    assert checkpoints.read(["x", "y"]) is None
    checkpoints.write(["x", "y"], ["1", "2"])
    assert checkpoints.read(["x", "y"]) == ["1", "2"]
    assert BlockCheckpoints(tmp_path, "others").read(["x", "y"]) is None
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    with pytest.raises(InvalidFileError, match=rf"{file.name}: expected"):
        checkpoints.read(["x", "y"])


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises(FileAccessError, param="checkpoint"):
        BlockCheckpoints(tmp_path / "file" / "folder", "facts")


SCRIPT = """
import json, sys
import ray
from penstock.offline.predictor import PenstockPredictor

ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, logging_level="ERROR", log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
prompts = json.loads(sys.argv[2])
rows = ray.data.from_items([{"id": i, "prompt": prompt} for i, prompt in enumerate(prompts)], override_num_blocks=2)
answered = rows.map_batches(
    PenstockPredictor,
    fn_constructor_kwargs={"model": sys.argv[1], "options": {"threads": 1}, "sampling": json.loads(sys.argv[3])},
    concurrency=2,
    batch_size=2,
    num_cpus=1,
)
print(json.dumps({row["id"]: row["answer"] for row in answered.take_all()}))
"""


@pytest.mark.long
@pytest.mark.skipif(bool(skip_reason()), reason=skip_reason())
def test_a_dataset_of_ray_is_answered(answers) -> None:
    pytest.importorskip("pyarrow")
    command = [sys.executable, "-c", SCRIPT, str(DEMO), json.dumps(PROMPTS), json.dumps(SAMPLING)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(RAY_AUTH_MODE="disabled"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [found[str(number)] for number in range(4)] == answers


RESTARTED = """
import json, sys, time
import ray
from penstock.offline.predictor import PenstockPredictor

pause_s = float(sys.argv[3])  # here: a process of Ray has other arguments

class Slow(PenstockPredictor):
    def __call__(self, batch):
        time.sleep(pause_s)
        return super().__call__(batch)

ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, logging_level="ERROR", log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
rows = ray.data.from_items([{"id": i, "prompt": f"def f{i}("} for i in range(24)], override_num_blocks=12)
answered = rows.map_batches(
    Slow,
    fn_constructor_kwargs={
        "model": sys.argv[1],
        "options": {"threads": 1},
        "sampling": {"max_tokens": 8, "temperature": 0},
        "checkpoint": sys.argv[2],
    },
    concurrency=2,
    batch_size=2,
    num_cpus=1,
)
print(json.dumps({row["id"]: row["answer"] for row in answered.take_all()}))
"""


@pytest.mark.long
@pytest.mark.skipif(bool(skip_reason()), reason=skip_reason())
def test_a_job_that_was_killed_goes_on(tmp_path: Path) -> None:
    """No block is computed twice, and each row has the answer of a model without Ray."""
    pytest.importorskip("pyarrow")
    folder, own = tmp_path / "checkpoint", environment(RAY_AUTH_MODE="disabled")

    def files() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.json")}

    def command(pause_s: float) -> list[str]:
        return [sys.executable, "-c", RESTARTED, str(DEMO), str(folder), str(pause_s)]

    killed = subprocess.Popen(command(1.0), env=own, stdout=subprocess.DEVNULL, start_new_session=True)
    until(lambda: len(files()) >= 3, "three blocks", process=killed, pause_s=0.1)
    left = psutil.Process(killed.pid).children(recursive=True)  # of Ray: some would compute a block more
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left)
    before = files()
    assert len(before) < 12
    done = subprocess.run(command(0.0), capture_output=True, text=True, env=own)
    assert done.returncode == 0, done.stderr
    assert len(files()) == 12
    assert files().items() >= before.items()
    found = json.loads(done.stdout.splitlines()[-1])
    with LLM(DEMO, threads=1) as llm:
        expected = llm.generate([f"def f{i}(" for i in range(24)], SamplingParams(**SAMPLING))
    assert [found[str(number)] for number in range(24)] == [result.text for result in expected]
