"""GGUF files at their own precision: packed blocks, mixes of types, and what the rounding of activations costs."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from penstock import LLM
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.gguf.element_types import ELEMENT_TYPES, dequantize
from penstock.checkpoint.tokenizer_file import LibraryTokenizer
from penstock.core import native
from penstock.core.layouts import BLOCKS
from penstock.core.metadata import read_metadata
from penstock.core.native import Model, cpu_levels
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.export import export_bundle
from penstock.graph.metadata import decode_metadata
from penstock.ops.table import BLOCK_SCHEMES
from penstock.quant.scheme import find_scheme
from tests.support.errors import raises
from tests.support.gguf_blocks import (
    DEMO_FOLDER,
    FLOAT_SCALES,
    SCALES_AT,
    TYPES,
    UNWRITABLE,
    random_blocks,
    values_of,
    write_demo,
)

LEVELS = [name for name, runnable in cpu_levels() if runnable]
IDS = [5, 9, 200, 31, 7, 1000, 44]


def mixed_type(name: str) -> str:
    """Return the types of a Q4_K_M file, in which rows of 704 fall back to types of 32 columns."""
    if "ffn_down" in name:
        return "q5_0" if name.startswith("blk.0") else "q8_0"
    if "attn_k" in name:
        return "q5_k"
    return "q6_k" if "attn_v" in name or name.startswith("token_embd") else "q4_k"


@pytest.mark.parametrize("scheme", BLOCK_SCHEMES)
def test_packed_blocks_have_their_exact_values(scheme: str) -> None:
    layout = find_scheme(scheme).layout
    for rows, cols in ((33, 512), (16, 3 * BLOCKS[layout].block_len)):
        blocks = random_blocks(scheme, rows, cols)
        expected = values_of(scheme, blocks)
        for level in LEVELS:
            with native.Context(2, level) as context:
                packed = np.zeros(native.layout_bytes(layout, rows, cols), np.uint8)
                for start, stop in ((0, 5), (5, rows)):
                    at = (layout, rows, cols, start, stop - start)
                    native.pack_blocks(context, *at, blocks[start:stop].copy(), packed)
                assert np.array_equal(native.unpack(context, layout, rows, cols, 0, rows, packed), expected)


def test_a_scale_that_is_not_finite_is_refused() -> None:
    for scheme in BLOCK_SCHEMES:
        blocks, layout = random_blocks(scheme, 2, 256), find_scheme(scheme).layout
        if scheme == "mxfp4":
            blocks[1, 17] = 253
        elif scheme in FLOAT_SCALES:
            blocks[1, :4] = 0x00, 0x00, 0x80, 0x7F
        else:
            blocks[1, SCALES_AT[scheme][-1] :][:2] = 0x00, 0x7C
        with native.Context(1) as context, raises(InvalidArgumentError, param="src", match="row 1 has a scale"):
            native.pack_blocks(
                context, layout, 2, 256, 0, 2, blocks, np.zeros(native.layout_bytes(layout, 2, 256), np.uint8)
            )


def test_a_zero_point_above_16_is_refused() -> None:
    blocks, layout = random_blocks("uint4", 2, 128), find_scheme("uint4").layout
    blocks[1, 19 + 2] = 17
    packed = np.zeros(native.layout_bytes(layout, 2, 128), np.uint8)
    with native.Context(1) as context, raises(InvalidArgumentError, param="src", match="row 1 has a scale"):
        native.pack_blocks(context, layout, 2, 128, 0, 2, blocks, packed)


def test_mxfp4_has_every_value_of_its_exponents() -> None:
    """The smallest and the largest exponent; a group of zeros may have any, and others are refused."""
    codes = np.arange(16, dtype=np.uint8)
    blocks, layout = np.empty((1, 4, 17), np.uint8), find_scheme("mxfp4").layout
    blocks[0, :, 1:] = codes | codes[::-1] << 4
    blocks[0, :, 0] = 2, 252, 127, 0
    blocks[0, 3, 1:] = np.array([0x00, 0x08, 0x80, 0x88] * 4)
    expected = dequantize(ELEMENT_TYPES[TYPES["mxfp4"]], blocks.reshape(-1))
    packed = np.zeros(native.layout_bytes(layout, 1, 128), np.uint8)
    for level in LEVELS:
        with native.Context(1, level) as context:
            native.pack_blocks(context, layout, 1, 128, 0, 1, blocks.reshape(1, -1), packed)
            assert np.array_equal(native.unpack(context, layout, 1, 128, 0, 1, packed)[0], expected)
            for exponent in (0, 1, 253, 255):
                wrong = blocks.copy()
                wrong[0, 2, 0] = exponent
                with raises(InvalidArgumentError, param="src", match="row 0 has a scale"):
                    native.pack_blocks(context, layout, 1, 128, 0, 1, wrong.reshape(1, -1), packed)


@pytest.mark.parametrize("scheme", ["tq1_0", "tq2_0"])
def test_ternary_values_are_those_of_the_gguf_package(scheme: str) -> None:
    kind = gguf.GGMLQuantizationType(TYPES[scheme])
    written = gguf.quantize(np.random.default_rng(2).normal(0, 0.1, (20, 512)).astype(np.float32), kind)
    stored, layout = ELEMENT_TYPES[TYPES[scheme]], find_scheme(scheme).layout
    assert stored.repacked is not None
    blocks = stored.repacked(written.reshape(-1, stored.block_bytes)).reshape(20, -1)
    packed = np.zeros(native.layout_bytes(layout, 20, 512), np.uint8)
    with native.Context(1) as context:
        native.pack_blocks(context, layout, 20, 512, 0, 20, blocks, packed)
        values = native.unpack(context, layout, 20, 512, 0, 20, packed)
    assert np.array_equal(values, gguf.dequantize(written, kind))
    # in memory at most a tenth more than in the file, for whole tiles of 16 rows
    assert native.layout_bytes(layout, 32, 512) <= 1.1 * 32 / 20 * written.size


def test_values_of_few_bits_are_those_of_ggml() -> None:
    """Q1_0 and Q2_0 have no dequantizer in the gguf package: value by value as ggml-common.h describes them."""
    one, two = random_blocks("q1_0", 1, 128)[0], random_blocks("q2_0", 1, 64)[0]
    d, e = (float(np.ascontiguousarray(block[:2]).view("<f2")[0]) for block in (one, two))
    signs = [d if int(one[2 + k // 8]) >> k % 8 & 1 else -d for k in range(128)]
    codes = [(int(two[2 + k // 4] >> 2 * (k % 4) & 3) - 1) * e for k in range(64)]
    assert np.array_equal(values_of("q1_0", one[None])[0], np.array(signs, np.float32))
    assert np.array_equal(values_of("q2_0", two[None])[0], np.array(codes, np.float32))


@pytest.mark.parametrize("scheme", ["nvfp4", "tq2_0", "tq1_0", "q2_0", "q1_0"])
def test_any_bytes_are_packed_or_refused(scheme: str) -> None:
    rng, layout = np.random.default_rng(3), find_scheme(scheme).layout
    row_bytes = 512 // BLOCKS[layout].block_len * BLOCKS[layout].block_bytes
    packed, num_refused = np.zeros(native.layout_bytes(layout, 1, 512), np.uint8), 0
    with native.Context(1) as context:
        for _ in range(300):
            blocks = rng.integers(0, 256, (1, row_bytes), dtype=np.uint8)
            try:
                native.pack_blocks(context, layout, 1, 512, 0, 1, blocks, packed)
            except InvalidArgumentError:
                num_refused += 1
            else:
                values = native.unpack(context, layout, 1, 512, 0, 1, packed)
                assert scheme in FLOAT_SCALES or np.isfinite(values).all()  # twice a float32 may be infinite
    assert 0 < num_refused < 300 or scheme == "nvfp4"


@pytest.fixture(scope="module")
def mixed_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixed") / "model.gguf"
    write_demo(path, mixed_type)
    return path


def test_each_tensor_of_a_mix_keeps_its_type(mixed_file: Path) -> None:
    checkpoint, bundle = Checkpoint.open(mixed_file), mixed_file.with_suffix(".psm")
    assert checkpoint.stored_bytes("model.layers.0.self_attn.q_proj.weight") == 256 * 256 // 256 * 144
    assert checkpoint.stored_bytes("model.norm.weight") == 256 * 4
    export_bundle(mixed_file, bundle)
    with Model.open(bundle) as model:
        graph, _ = decode_metadata(read_metadata(bundle, model.stamp))
    assert graph.scheme == "q4_k"
    schemes = {
        node.name.removeprefix("model.layers."): node.attrs["scheme"] for node in graph.nodes if node.op == "linear"
    }
    assert {name: scheme for name, scheme in schemes.items() if name[0] in "01l"} == {
        "0.self_attn.q_proj": "q4_k", "0.self_attn.k_proj": "q5_k", "0.self_attn.v_proj": "q6_k",
        "0.self_attn.o_proj": "q4_k", "0.mlp.gate_proj|up_proj": "q4_k", "0.mlp.down_proj": "q5_0",
        "1.self_attn.q_proj": "q4_k", "1.self_attn.k_proj": "q5_k", "1.self_attn.v_proj": "q6_k",
        "1.self_attn.o_proj": "q4_k", "1.mlp.gate_proj|up_proj": "q4_k", "1.mlp.down_proj": "q8_0",
        "lm_head": "q6_k",
    }  # fmt: skip
    (table,) = [node.inputs[1].name for node in graph.nodes if node.op == "embedding"]
    assert graph.weights[table].layout.name == "T16_Q6_K"


@pytest.mark.long
def test_a_mix_has_equal_logits_in_graph_and_eager_mode(mixed_file: Path) -> None:
    with LLM(mixed_file, use_cache=False) as llm, LLM(mixed_file, mode="eager") as eager:
        assert llm.info.scheme == eager.info.scheme == "q4_k"
        assert np.array_equal(llm.logits(IDS), eager.logits(IDS))
        assert np.array_equal(llm.logits(IDS)[:3], llm.logits(IDS[:3]))


@pytest.mark.long
@pytest.mark.parametrize("scheme", [pytest.param(name, marks=() if name == "q4_k" else pytest.mark.long)
                                    for name in BLOCK_SCHEMES if name in TYPES and name not in UNWRITABLE])  # fmt: skip
def test_the_cost_against_exact_values_is_that_of_activations(tmp_path: Path, scheme: str) -> None:
    """The demo model in its blocks against the same values in float32: activations of 8 bit are all that differs."""
    write_demo(tmp_path / "model.gguf", lambda name: "q8_0" if "ffn_down" in name else scheme)
    text = (DEMO_FOLDER / "valid.txt").read_text()[:4000]
    ids = LibraryTokenizer((DEMO_FOLDER / "tokenizer.json").read_bytes()).encode(text)[:512]
    logits = {}
    for chosen in (None, "f32"):
        with LLM(tmp_path / "model.gguf", scheme=chosen, kv_cache="f32", use_cache=False) as llm:
            assert llm.info.scheme == (chosen or scheme)
            logits[chosen] = llm.logits(ids).astype(np.float64)
    own, exact = (
        values - np.logaddexp.reduce(values, axis=1, keepdims=True) for values in (logits[None], logits["f32"])
    )
    divergence = (np.exp(exact) * (exact - own)).sum(axis=1).mean()
    rows, following = np.arange(len(ids) - 1), np.array(ids[1:])
    increase = (exact[rows, following] - own[rows, following]).mean()
    # Weights of one or two bits leave little of this model: its activations are larger beside its logits.
    assert 0 < divergence < (1e-3 if scheme in ("tq1_0", "tq2_0", "q1_0") else 3e-4)
    assert abs(increase) < 3 * np.sqrt(2 * divergence / len(ids)) + 1e-3


def test_other_schemes_of_blocks_are_refused(tmp_path: Path, mixed_file: Path) -> None:
    with raises(UnsupportedError, param="scheme", match="q8_0"):
        export_bundle(mixed_file, tmp_path / "out.psm", scheme="q8_0")
    with raises(UnsupportedError, param="scheme", match="q8_0"):
        Checkpoint.open(DEMO_FOLDER).choose_scheme("q8_0")
    assert Checkpoint.open(mixed_file).choose_scheme("w8a8") == "w8a8"
