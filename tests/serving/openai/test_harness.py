"""lm-eval's own client of a service: a small local task, over ``/v1/completions`` with echo and log-probabilities."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from penstock.llm.llm import LLM
from tests.support.http_service import Service

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "demo" / "demo.psm"


def test_lm_eval_scores_the_demo_model_over_http(tmp_path) -> None:
    """As in docs/guides/evaluation.md: 24 lines of Python with four ends each, of which chance would find a quarter."""
    with LLM(DEMO) as llm:
        running = Service({"demo": llm})
        try:
            arguments = {
                "base_url": f"{running.url}/v1/completions",
                "model": "demo",
                "tokenizer": "demo/model",
                "num_concurrent": "4",
            }
            asked = {"model": "local-completions", "tasks": "python_lines", "include_path": "examples/evaluation"}
            asked["output_path"] = str(tmp_path / "out")
            asked["model_args"] = ",".join(f"{key}={value}" for key, value in arguments.items())
            done = subprocess.run(
                ["lm-eval", "run", *(word for key, value in asked.items() for word in (f"--{key}", value))],
                cwd=ROOT,
                env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
                capture_output=True,
                text=True,
                timeout=600,
            )
        finally:
            running.close()
    assert done.returncode == 0, done.stderr[-3000:]
    (written,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(written.read_text())["results"]["python_lines"]
    assert found["acc,none"] == pytest.approx(0.8333, abs=0.05)  # one document of 24
    assert found["acc_norm,none"] >= 0.7
