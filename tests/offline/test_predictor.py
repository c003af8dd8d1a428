"""``PenstockPredictor``, the class for ``ray.data``."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.errors import InvalidArgumentError
from penstock.offline.predictor import PenstockPredictor
from tests.support.command import DEMO, environment
from tests.support.ray_cluster import skip_reason

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
        with pytest.raises(InvalidArgumentError, match="prompt_column: expected one of id, got 'text'"):
            predictor({"id": ids})
    finally:
        predictor.close()


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
