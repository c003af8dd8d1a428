"""Eager mode under ranks: gloo brings together what each process computes, and the bits are those of graph mode."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from penstock import LLM
from penstock.errors import UnsupportedError
from tests.support.errors import raises
from tests.support.families import save
from tests.support.marks import mostly_long
from tests.support.rank_programs import run_ranks

ASK = """
import json, os, sys
from penstock import LLM
folder, out, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
with LLM(folder, mode="eager", threads=1, context_len=128, tensor_parallel_size=world, **options) as llm:
    logits = [llm.logits(ids).tobytes().hex() for ids in ([7, 300, 41, 9], [5], list(range(3, 80)))]
    answers = llm.generate([[7, 300, 41], [9, 8, 1, 2], [600]], max_tokens=6, temperature=0)
    ids = [list(answer.token_ids) for answer in answers]
open(f"{out}/{rank}.json", "w").write(json.dumps([logits, ids]))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "scheme", "world"),
    mostly_long(
        [
            *(("llama", "w8a8", 2), ("qwen3_tied_head_dim", "bf16", 3), ("qwen2_windows", "w4a8", 2)),
            *(("llama", "f32", 2), ("gpt_oss", "w4a8", 2), ("mixtral", "bf16", 3)),
        ],
        ("qwen3_tied_head_dim", "bf16", 3),
    ),
)
def test_eager_ranks_have_the_bits_of_graph_mode(
    family: str, scheme: str, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    folder = save(family, tmp_path / family)
    options = json.dumps({"scheme": scheme})
    done = run_ranks("penstock launch", world, sys.executable, "-c", ASK, folder, tmp_path, options)
    assert done.returncode == 0, done.stderr
    with LLM(folder, scheme=scheme, threads=1, context_len=128) as llm:
        expected = [llm.logits(ids).tobytes().hex() for ids in ([7, 300, 41, 9], [5], list(range(3, 80)))]
        answers = llm.generate([[7, 300, 41], [9, 8, 1, 2], [600]], max_tokens=6, temperature=0)
        tokens = [list(answer.token_ids) for answer in answers]
    for rank in range(world):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [expected, tokens]


def test_eager_ranks_need_a_launcher(tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "llama")
    with raises(UnsupportedError, param="tensor_parallel_size", match="penstock launch --nproc 2"):
        LLM(folder, mode="eager", tensor_parallel_size=2)


@pytest.mark.long
def test_eager_ranks_with_other_calls_name_it(tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "llama")
    script = ASK.replace("[7, 300, 41, 9]", "[7, 300, 41, 9 + rank]")
    done = run_ranks("penstock launch", 2, sys.executable, "-c", script, folder, tmp_path, "{}")
    assert done.returncode != 0
    assert "batch: expected equal batches on all ranks, got another on rank" in done.stderr
