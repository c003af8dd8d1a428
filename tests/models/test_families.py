"""Every family against transformers in float32, and against itself in other steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.runtime.eager import EagerProgram
from penstock.runtime.program import ProgramLimits
from tests.models.steps import relative_error, run_whole
from tests.support.families import FAMILY_PARAMS, expected_logits, prompt, save

LIMITS = ProgramLimits(max_tokens=128, max_requests=4, max_rows=128, num_pages=12, context_len=256)
LENGTHS = (31, 33, 70)


@pytest.fixture(scope="module", params=FAMILY_PARAMS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EagerProgram]:
    folder = save(request.param, tmp_path_factory.mktemp("models") / request.param)
    program = EagerProgram(folder, threads=1, limits=LIMITS)
    program.family = request.param
    yield program
    program.close()


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_native_kernels_match_transformers(program: EagerProgram, num_tokens: int) -> None:
    token_ids = prompt(num_tokens)
    error = relative_error(run_whole(program, token_ids), expected_logits(program.family, token_ids))
    assert error < 1e-4


def test_references_match_transformers(program: EagerProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REFERENCE", "1")
    token_ids = prompt(70)
    error = relative_error(run_whole(program, token_ids), expected_logits(program.family, token_ids))
    assert error < 1e-4


@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_cached_matches_uncached(program: EagerProgram, chunk: int) -> None:
    token_ids = prompt(70)
    whole, chunked = run_whole(program, token_ids), run_whole(program, token_ids, chunk)
    assert whole.tobytes() == chunked.tobytes()


@pytest.mark.parametrize("family", ["llama_tied_one_kv_head", "qwen2_windows"])
@pytest.mark.parametrize("kv_layout", ["bf16", "int8"])
def test_small_kv_pages_stay_close(family: str, kv_layout: str, tmp_path: Path) -> None:
    limits = ProgramLimits(128, 4, max_rows=128, num_pages=12, context_len=256, kv_layout=kv_layout)
    program = EagerProgram(save(family, tmp_path / family), threads=1, limits=limits)
    token_ids = prompt(70)
    whole = run_whole(program, token_ids)
    assert 1e-6 < relative_error(whole, expected_logits(family, token_ids)) < 5e-2
    assert whole.tobytes() == run_whole(program, token_ids, 7).tobytes()
    program.close()


@pytest.mark.parametrize("scheme", ["bf16", "w8a8", "w4a8"])
def test_experts_do_not_depend_on_chunks(scheme: str, tmp_path: Path) -> None:
    program = EagerProgram(save("mixtral", tmp_path / "mixtral"), scheme=scheme, threads=1, limits=LIMITS)
    token_ids = prompt(70)
    whole = run_whole(program, token_ids)
    assert relative_error(whole, expected_logits("mixtral", token_ids)) > 1e-6  # the scheme rounds
    assert whole.tobytes() == run_whole(program, token_ids, 7).tobytes()
    program.close()
