"""Networks whose layers see a window, through the engine: pages that nobody sees any more are given up, tokens stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import LLM, ProgramLimits, SamplingParams
from penstock.engine.pages import FREED
from penstock.graph.export import export_bundle
from penstock.runtime.program import PAGE_TOKENS
from tests.support.families import expected_logits, prompt, save
from tests.support.marks import mostly_long

FAMILIES = mostly_long(
    ["mistral_window", "qwen2_windows", "qwen3_biases_windows", "lfm2", "lfm2_biases", "qwen3_next", "falcon_h1"],
    "mistral_window",
    "lfm2",
    "qwen3_next",
)
PROMPTS = [prompt(10), prompt(70), prompt(150), [*prompt(150)[:96], *prompt(40)]]
CHUNK = 48


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_windowed_layers_give_up_pages_and_change_no_token(family: str, tmp_path: Path) -> None:
    """Several at once, chunked, preempted and from the cache, each token the one that transformers finds likeliest."""
    export_bundle(save(family, tmp_path / family), tmp_path / "model.psm", scheme="f32")
    limits = ProgramLimits(64, 4, num_pages=15, context_len=256)
    params = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
    with LLM(tmp_path / "model.psm", limits=limits, max_chunk=CHUNK) as llm:
        engine = llm.engine
        windows = engine.scheduler.ledger.windows
        most = [0] * len(windows)

        def look(_news: object) -> None:
            for request in engine.scheduler.running:
                for group, table in enumerate(request.pages.tables):
                    most[group] = max(most[group], sum(page != FREED for page in table))

        engine.observer = look
        first = llm.generate(PROMPTS, params)
        assert engine.figures().num_preemptions > 0 or 0 not in windows
        again = llm.generate(PROMPTS, params)
    assert [one.token_ids for one in again] == [one.token_ids for one in first]
    assert sum(one.num_cached_tokens for one in again) >= 96
    for asked, result in zip(PROMPTS, first, strict=True):
        rows = expected_logits(family, [*asked, *result.token_ids])[len(asked) - 1 : -1]
        chosen = rows[range(len(rows)), result.token_ids]
        assert (rows.max(axis=1) - chosen).max() < 1e-3 * abs(rows).max()
    assert any(window > 0 for window in windows)
    for window, held in zip(windows, most, strict=True):
        whole = -(-(150 + 80 - 1) // PAGE_TOKENS)
        assert held == whole if window == 0 else held <= -(-(window + CHUNK) // PAGE_TOKENS) + 1 < whole
