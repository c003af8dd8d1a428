"""Keys and values of 4 bits: the bytes of a page against NumPy, what the rotation is for, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.plant_outliers import plant_outliers
from penstock.core import native
from penstock.errors import UnsupportedError
from penstock.graph.export import export_bundle
from penstock.llm.llm import LLM
from penstock.ops.eager import ops
from penstock.ops.pages import page_elements
from penstock.runtime.eager import EagerProgram
from penstock.runtime.native import NativeProgram, fit_limits
from penstock.runtime.program import ProgramLimits
from tests.models.steps import run_whole
from tests.support.command import FOLDER
from tests.support.errors import raises
from tests.support.families import prompt, save

SIGNS = np.array([1, 1, 1, -1, 1, 1, 1, -1, 1, 1, 1, -1, -1, -1, -1, 1])
IDS = list(range(5, 133))


def rotation(dim: int) -> np.ndarray:
    """The matrix [dim, dim] that a row is multiplied by: blocks of powers of two, each orthonormal."""
    matrix, at = np.eye(dim), 0
    while dim - at >= 16:
        size = 1 << ((dim - at).bit_length() - 1)
        hadamard = np.ones((1, 1))
        while len(hadamard) < size:
            hadamard = np.kron(hadamard, [[1, 1], [1, -1]])
        places = np.arange(size)
        signs = SIGNS[places % 16] * SIGNS[places // 16 % 16]
        matrix[at : at + size, at : at + size] = signs[:, None] * hadamard / size**0.5
        at += size
    return matrix


@pytest.mark.parametrize("dim", [8, 17, 64, 80, 128])
def test_a_page_holds_rotated_nibbles(dim: int) -> None:
    heads, tokens = 2, 33
    rng = np.random.default_rng(dim)
    rows = [rng.normal(size=(tokens, heads, dim)).astype(np.float32) for _ in range(2)]
    rows[0][7, 1, 3] = 60.0
    rows[1][9] = 0.0
    state = torch.zeros(3, page_elements(torch.uint8, heads, dim), dtype=torch.uint8)
    places = (torch.arange(tokens, dtype=torch.int32), torch.tensor([0, tokens], dtype=torch.int32))
    table = torch.tensor([[[2, 0]]], dtype=torch.int32)
    ops.kv_append(*(torch.from_numpy(row) for row in rows), state, *places, table, group=0)
    row_bytes = -(-dim // 2)
    part_bytes = 32 * row_bytes
    matrix = rotation(dim)
    for token in range(tokens):
        page, slot = (2, 0)[token // 32], token % 32
        for head in range(heads):
            data = state[page].numpy().reshape(heads, -1)[head]
            keys, values = np.split(data, [part_bytes + 128])
            pairs = keys[slot:part_bytes:32], values[slot * row_bytes : (slot + 1) * row_bytes]
            nibbles = [np.stack((row & 15, row >> 4), 1).ravel()[:dim] for row in pairs]
            scales = [part[part_bytes:].view(np.float32)[slot] for part in (keys, values)]
            for row, q, scale in zip(rows, nibbles, scales, strict=True):
                rotated = row[token, head].astype(np.float64) @ matrix
                np.testing.assert_allclose(scale, np.abs(rotated).max() / 15, rtol=1e-5)
                error = np.abs((2.0 * q - 15) * scale - rotated)
                assert error.max() <= scale * 1.0001  # half a step
                assert np.array_equal(q[error < 0.99 * scale], _nearest(rotated, scale)[error < 0.99 * scale])


def _nearest(rotated: np.ndarray, scale: float) -> np.ndarray:
    levels = np.arange(-15, 16, 2) * float(scale)
    return np.abs(rotated[:, None] - levels).argmin(1)


def logits(path: Path, kv_cache: str) -> np.ndarray:
    with LLM(path, use_cache=False, limits=ProgramLimits(kv_layout=kv_cache)) as llm:
        return np.asarray(llm.logits(IDS))


def test_rotation_spreads_planted_keys(tmp_path: Path) -> None:
    plant_outliers(FOLDER, tmp_path / "planted", ("keys",), 32.0, share=0.05)
    loss = {}
    for name, path in (("plain", FOLDER), ("planted", tmp_path / "planted")):
        exact = logits(path, "f32")
        loss[name] = float(np.square(logits(path, "int4") - exact).mean() / np.square(exact).mean())
    assert 0 < loss["plain"] < 0.01
    assert loss["planted"] < 0.08  # 0.037; the divergence is 5.6 times that without a rotation


def test_each_thread_has_room_to_widen_pages() -> None:
    """Pages of a partition as int8, which two threads would share if the plan did not know their type."""
    plans = {}
    with native.Model.open(FOLDER.parent / "demo.psm") as model, native.Context(2) as context:
        for kv_cache in ("int8", "int4"):
            _, plans[kv_cache] = fit_limits(model, context, ProgramLimits(max_requests=1, kv_layout=kv_cache))
    partition_pages, head_dim = 8, 64
    room = 2 * partition_pages * page_elements(torch.int8, 1, head_dim)
    assert plans["int4"].scratch_bytes - plans["int8"].scratch_bytes >= room
    assert 1.8 < plans["int8"].kv_bytes / plans["int4"].kv_bytes < 2


def test_a_convolution_reads_its_inputs(tmp_path: Path) -> None:
    limits = ProgramLimits(128, 4, max_rows=128, num_pages=12, context_len=256, kv_layout="int4")
    folder = save("lfm2", tmp_path / "folder")
    export_bundle(folder, tmp_path / "model.psm", scheme="w8a8")
    native, _ = NativeProgram.open(tmp_path / "model.psm", threads=2, limits=limits)
    eager = EagerProgram(folder, scheme="w8a8", threads=1, limits=limits)
    whole = run_whole(native, prompt(70))
    assert whole.tobytes() == run_whole(eager, prompt(70), 7).tobytes()
    native.close()
    eager.close()


def test_latents_are_refused(tmp_path: Path) -> None:
    limits = ProgramLimits(128, 4, max_rows=128, num_pages=12, context_len=256, kv_layout="int4")
    folder = save("deepseek_v3", tmp_path / "folder")
    export_bundle(folder, tmp_path / "model.psm", scheme="f32")
    with raises(UnsupportedError, param="kv_layout"):
        NativeProgram.open(tmp_path / "model.psm", threads=1, limits=limits)
    with raises(UnsupportedError, param="kv_layout"):
        EagerProgram(folder, threads=1, limits=limits)
