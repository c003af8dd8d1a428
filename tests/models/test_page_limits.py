"""Layers with a window or a state have only the pages that their requests need: in the plan, and in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from penstock import LLM, ProgramLimits, SamplingParams
from penstock.config import ConfigReader
from penstock.core import native
from penstock.engine.page_copies import grant_pages, hold_pages
from penstock.graph.export import build_graph, export_bundle
from penstock.graph.without_weights import write_without_weights
from penstock.models.meta import construct_on_meta
from penstock.runtime.native import fit_limits
from penstock.runtime.program import PAGE_TOKENS
from tests.support.families import prompt, save

PROMPTS = [prompt(10), prompt(70), prompt(150), [*prompt(150)[:96], *prompt(40)], prompt(200)]
PARAMS = SamplingParams(max_tokens=56, temperature=0, ignore_eos=True, logprobs=1)


def test_states_of_long_contexts_are_those_of_requests(tmp_path: Path) -> None:
    """Four layers with the sizes of Qwen3.5-0.8B, at 32k tokens."""
    sizes = {
        "vocab_size": 1024, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 4, "head_dim": 256,
        "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "max_position_embeddings": 32768,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model("qwen3_5_text", **sizes).to_dict()
    graph, _ = build_graph(construct_on_meta(ConfigReader(config)), "bf16", "bf16")
    write_without_weights(tmp_path / "model.psm", graph)
    key_value_bytes = 2 * 2 * 256 * 32 * 2
    # 16 heads of 128 x 128, 3 inputs of 3 x 128 channels, and the number of tokens, to a multiple of 16
    state_bytes = 3 * 16 * (128 * 128 + 3 * 3 * 128 + 16) * 4
    with native.Model.open(tmp_path / "model.psm") as model, native.Context(1) as context:
        for max_requests in (1, 8):
            limits, plan = fit_limits(model, context, ProgramLimits(max_requests=max_requests), 1 << 40)
            assert limits.num_pages == 1024 * max_requests
            num_states = 4 * max_requests + 512 // 32
            assert plan.kv_bytes == limits.num_pages * key_value_bytes + num_states * state_bytes
        # With little memory the pages of keys and values shrink, and the states stay.
        base = plan.total_bytes - plan.kv_bytes + (64 << 20) + num_states * state_bytes
        asked = ProgramLimits(max_requests=8, context_len=4096)
        tight, plan = fit_limits(model, context, asked, base + 4 * 300 * key_value_bytes)
        assert 128 <= tight.num_pages < 1024
        assert plan.kv_bytes == tight.num_pages * key_value_bytes + num_states * state_bytes


@pytest.mark.parametrize(("family", "least"), [("qwen3_next", 9), pytest.param("lfm2", 13, marks=pytest.mark.long)])
def test_few_states_change_no_answer(family: str, least: int, tmp_path: Path) -> None:
    """Batched, chunked, preempted and from the cache; states for two requests, and keys and values for many."""
    path = tmp_path / "model.psm"
    export_bundle(save(family, tmp_path / family), path, scheme="f32")
    alone = []
    for ids in PROMPTS:
        with LLM(path, limits=ProgramLimits(256, 1, context_len=256)) as llm:
            alone += llm.generate([ids], PARAMS)
    many, few = (ProgramLimits(*sizes, context_len=256) for sizes in ((32, 2, 0, 40), (48, 3, 0, 11)))
    for limits, cached in ((many, True), (few, False)):
        with LLM(path, limits=limits, prefix_cache=cached) as llm:
            pools = llm.engine.scheduler.ledger.pools
            windowed = min(pool.num_pages for pool in pools)
            assert windowed == (least if cached else 11)
            for _ in range(2):
                results = llm.generate(PROMPTS, PARAMS)
                assert [one.token_ids for one in results] == [one.token_ids for one in alone]
                assert [one.logprobs for one in results] == [one.logprobs for one in alone]
            assert cached or llm.engine.figures().num_preemptions > 0
            assert not cached or sum(one.num_cached_tokens for one in results) > 0


@pytest.mark.parametrize(
    "family",
    ["qwen3_next", *(pytest.param(name, marks=pytest.mark.long) for name in ("lfm2", "falcon_h1", "deepseek_v3"))],
)
def test_states_move_to_another_engine(family: str, tmp_path: Path) -> None:
    """A prompt's pages are copied with its states, and the answer goes on from them with the bits of its own engine."""
    path, ids = tmp_path / "model.psm", prompt(101)
    export_bundle(save(family, tmp_path / family), path, scheme="f32")
    limits = ProgramLimits(128, 2, context_len=256)
    with LLM(path, limits=limits) as first, LLM(path, limits=limits) as second:
        expected = first.generate(ids, PARAMS)
        sender = hold_pages(first.engine, ids, "")
        assert sender is not None
        receiver = grant_pages(second.engine, ids[: sender.num_pages * PAGE_TOKENS], "")
        assert receiver is not None
        sender.begin_at(receiver.first)
        while (data := sender.read()) is not None:
            assert receiver.write(data)
        assert receiver.use(sender.num_done, sender.checksum)
        sender.release()
        receiver.release()
        moved = second.generate(ids, PARAMS)
        assert moved.num_cached_tokens == 96
        assert (moved.token_ids, moved.logprobs) == (expected.token_ids, expected.logprobs)
