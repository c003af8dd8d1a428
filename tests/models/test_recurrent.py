"""Recurrent states in pages: they have no way back, follow no format of keys and values, and are in the plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from penstock.core import native
from penstock.core.native import StepBatch
from penstock.errors import InvalidArgumentError
from penstock.graph.bundle import read_graph
from penstock.graph.export import export_bundle
from penstock.graph.passes.shard import shard
from penstock.runtime.eager import EagerProgram
from penstock.runtime.native import NativeProgram
from penstock.runtime.program import Program, ProgramLimits
from tests.models.steps import int32, relative_error, run_whole
from tests.support.errors import raises
from tests.support.families import prompt, save, sizes_of

LIMITS = ProgramLimits(max_tokens=128, max_requests=4, max_rows=128, num_pages=12, context_len=256, kv_layout="int8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save("qwen3_next", tmp_path_factory.mktemp("recurrent") / "qwen3_next")
    export_bundle(folder, folder / "model.psm", scheme="f32")
    return folder


def run(program: Program, first: int, count: int, pages: tuple[int, ...] = (3, 1, 4)) -> np.ndarray:
    """Logits of tokens ``first`` to ``first`` + ``count`` - 1 of one request."""
    tables = int32(np.broadcast_to(pages, (len(program.info.page_windows), 1, len(pages))))
    ids = int32(prompt(96)[first : first + count])
    positions = int32(range(first, first + count))
    program.run(StepBatch(ids, positions, int32([0, count]), tables, int32(range(count))))
    return program.logits().copy()


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_a_request_goes_on_only_where_its_state_ends(mode: str, folder: Path) -> None:
    """A step that repeats positions or leaves some out is refused, and one that follows a full page is not."""
    if mode == "graph":
        program: Program = NativeProgram.open(folder / "model.psm", threads=2, limits=LIMITS)[0]
    else:
        program = EagerProgram(folder, threads=1, limits=LIMITS)
    run(program, 0, 40)
    rows = run(program, 40, 10)
    for first in (39, 41, 51):
        with raises(InvalidArgumentError, param="positions[0]"):
            run(program, first, 2)
    run(program, 32, 8)  # the end of a full page is a snapshot
    assert run(program, 40, 10).tobytes() == rows.tobytes()
    program.close()


def test_states_are_float32_whatever_the_keys_are(folder: Path) -> None:
    graph, _ = read_graph(folder / "model.psm")
    recurrent = [state for state in graph.states.values() if state.recurrent]
    assert len(recurrent) == 3
    # 3 value heads of 20 x 24, 3 inputs of the convolution, and the number of tokens, to a multiple of 16
    assert {(state.num_kv_heads, state.head_dim) for state in recurrent} == {(2, 1792)}
    with native.Model.open(folder / "model.psm") as model, native.Context(1) as context:
        sizes = [native.plan(model, context, native.ProgramOptions(8, 1, 1, 4, 0, n)).kv_page_bytes for n in (1, 3)]
    attention = sizes[0] - 3 * 2 * 1792 * 4  # 5 heads of 32: keys and values
    assert (attention, sizes[1] - 3 * 2 * 1792 * 4) == (2 * 5 * 32 * 32 * 4, 2 * 5 * 32 * (32 + 4))


def test_states_are_cut_by_heads_or_whole(folder: Path) -> None:
    """A rank has the state of its key heads; with more ranks than key heads, or over contexts, that of all."""
    graph = read_graph(folder / "model.psm")[0]
    for world, contexts, expected in ((2, 1, 1), (3, 1, 2), (2, 2, 2)):
        states = shard(graph, 0, world, contexts=contexts)[0].states.values()
        assert {state.num_kv_heads for state in states if state.recurrent} == {expected}, (world, contexts)


@pytest.mark.parametrize(("model_type", "stacked"), [("qwen3_5", False), ("qwen3_5_moe", False), ("qwen3_5_moe", True)])
def test_a_folder_with_images_is_read_for_text(model_type: str, stacked: bool, tmp_path: Path) -> None:
    """Also one whose experts are in one tensor for a layer."""
    text = sizes_of(f"{model_type}_text")
    text["rope_parameters"] = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_type": "default"}
    text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    images = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 20, "out_hidden_size": 160}
    config = transformers.AutoConfig.for_model(model_type, text_config=text, vision_config=images)
    kind = "Qwen3_5Moe" if model_type.endswith("moe") else "Qwen3_5"
    torch.manual_seed(0)
    network = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    network.save_pretrained(tmp_path / "model", save_original_format=not stacked)
    token_ids = prompt(40)
    with torch.no_grad():
        expected = network(input_ids=torch.tensor([token_ids])).logits[0].numpy()
    program = EagerProgram(tmp_path / "model", threads=1, limits=ProgramLimits(64, 1, 64, 4, 128))
    assert relative_error(run_whole(program, token_ids), expected) < 1e-4
    program.close()
