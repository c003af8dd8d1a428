"""The demo model: its bundles in three schemes, what the engine makes of them, and calls of a Model in few words."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from penstock import lite
from penstock.checkpoint.folder import Checkpoint

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "demo" / "demo.psm"
FOLDER = ROOT / "demo" / "model"
IDS = [7, 300, 41, 9, 2048, 5, 77, 4000, 12, 600, 33]
VOCAB = 4096
LAYER = "model.layers.3."
CHANGED = (
    "model.embed_tokens.weight",
    "model.norm.weight",
    LAYER + "self_attn.k_proj.weight",
    LAYER + "mlp.up_proj.weight",
    LAYER + "input_layernorm.weight",
)


def build(path: Path = BUNDLE, context: lite.Context | None = None, **config: object) -> lite.Model:
    """A model that is built."""
    model = lite.Model()
    model.build_from_file(path, lite.ModelType.PENSTOCK, context, config)
    return model


def tensors(rows: Sequence[Sequence[int]], reset: Sequence[int] | int = 1, width: int = 0) -> list[lite.Tensor]:
    """Inputs of rows of different lengths, padded with ids that no vocabulary has."""
    width = width or max(map(len, rows))
    token_ids = np.full((len(rows), width), -1, np.int32)
    for row, ids in enumerate(rows):
        token_ids[row, : len(ids)] = ids
    counts = np.array([len(ids) for ids in rows], np.int32)
    resets = np.full(len(rows), reset, np.int32) if isinstance(reset, int) else np.array(reset, np.int32)
    return [lite.Tensor(token_ids), lite.Tensor(counts), lite.Tensor(resets)]


def ask(model: lite.Model, rows: Sequence[Sequence[int]], reset: Sequence[int] | int = 1) -> npt.NDArray[np.float32]:
    """The first output of a model for these rows, whatever its shapes were."""
    given = tensors(rows, reset)
    model.resize(given, [one.shape for one in given])
    return model.predict(given)[0].get_data_to_numpy()


def values(scale: float = 1.0) -> dict[str, npt.NDArray[np.float32]]:
    """The demo's weights as float32, which holds bfloat16 exactly; the changed ones times ``scale``, unevenly."""
    checkpoint = Checkpoint.open(FOLDER)
    found = {}
    for name, info in checkpoint.tensors.items():
        bits = np.array(checkpoint.read(name)).astype(np.uint32) << 16
        array = bits.view(np.float32).reshape(info.shape)
        if name in CHANGED and scale != 1.0:
            array = array * (scale + 0.01 * (np.arange(array.size) % 7).reshape(array.shape)).astype(np.float32)
        found[name] = array
    return found


def folder(path: Path, weights: dict[str, npt.NDArray[np.float32]]) -> Path:
    path.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, path / name)
    save_file(weights, path / "model.safetensors")
    return path
