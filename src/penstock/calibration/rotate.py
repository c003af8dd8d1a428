"""Rotations that are folded into the weights and cost nothing at run time (QuaRot, Ashkboos et al., arXiv 2404.00456;
SpinQuant, Liu et al., arXiv 2405.16406).

R1 rotates the residual stream: the rows of the embedding, the inputs of q, k, v, gate, up and the head, and the outputs
of o and down.  The weights of the norms are multiplied into the columns behind them first, and become ones, because a
norm of root mean squares without weights commutes with a rotation.  R2 rotates the values of each head: the rows of v,
and the columns of o that read them.  Both are random Hadamard matrices, by blocks of the largest power of two that
divides the width.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.calibration.unfinished import ROTATED, Workspace
from penstock.checkpoint.float_types import convert_floats, to_float32
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.pooling.head import POOLING_FILE
from penstock.checkpoint.quantize import check_float_weights
from penstock.checkpoint.side_files import write_side_files
from penstock.config import check_choice
from penstock.errors import UnsupportedError
from penstock.models.mapped import open_mapped
from penstock.quant.folder import ROTATION_KEY, check_new_folder, new_folder
from penstock.quant.hadamard import ROTATIONS
from penstock.quant.mixed_schemes import HEAD_NAME
from penstock.quant.tensor_writer import TensorEntry, TensorWriter

__all__ = ["FAMILIES", "rotate_checkpoint", "rotated_folder"]

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
"""Families with norms of root mean squares, whose weights multiply, before each block and nowhere behind it."""
_EMBEDDING: Final = "model.embed_tokens.weight"
_FINAL_NORM: Final = "model.norm.weight"
_NORMS: Final = {
    "input_layernorm.weight": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm.weight": ("mlp.gate_proj", "mlp.up_proj"),
}
_WRITERS: Final = ("self_attn.o_proj", "mlp.down_proj")
_SEED: Final = 0
Rotate = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def random_hadamard(width: int, seed: int) -> Rotate:
    """Return what multiplies the last axis, of ``width``, by random signs and an orthogonal block Hadamard matrix."""
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], width)
    block = width & -width

    def rotate(x: NDArray[np.float64]) -> NDArray[np.float64]:
        blocks = (x * signs).reshape(-1, block)
        distance = block // 2
        while distance:
            pairs = blocks.reshape(len(blocks), block // 2 // distance, 2, distance)
            blocks = np.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), axis=2)
            blocks = blocks.reshape(-1, block)
            distance //= 2
        rotated: NDArray[np.float64] = (blocks / math.sqrt(block)).reshape(x.shape)
        return rotated

    return rotate


class _Rotation:
    """The tensors of a checkpoint, rotated one at a time."""

    def __init__(self, checkpoint: Checkpoint, rotation: str) -> None:
        self._checkpoint, config = checkpoint, checkpoint.config
        hidden, heads = config.int("hidden_size", min=1), config.int("num_attention_heads", min=1)
        self._head_dim = config.int("head_dim", hidden // heads, min=1)
        self._r1 = random_hadamard(hidden, _SEED) if "r1" in rotation else None
        self._r2 = random_hadamard(self._head_dim, _SEED + 1) if "r2" in rotation else None
        redundant = checkpoint.redundant_names()
        self.names = [name for name in checkpoint.tensors if name not in redundant]
        self.is_untied = self._r1 is not None and HEAD_NAME not in self.names
        if self.is_untied:
            self.names.append(HEAD_NAME)
        self._norms = {HEAD_NAME: _FINAL_NORM}
        for layer in range(config.int("num_hidden_layers", min=1)):
            for norm, readers in _NORMS.items():
                at = f"model.layers.{layer}."
                self._norms |= {f"{at}{reader}.weight": f"{at}{norm}" for reader in readers}

    def source(self, name: str) -> str:
        """Return the tensor of the checkpoint that has the shape and type: of a head that was tied, the embedding."""
        return _EMBEDDING if name == HEAD_NAME and self.is_untied else name

    def _floats(self, name: str) -> NDArray[np.float64]:
        values = to_float32(self._checkpoint.read(name), self._checkpoint.tensors[name].dtype).astype(np.float64)
        self._checkpoint.release(name)
        return values

    def tensor(self, name: str) -> NDArray[Any]:
        """Return a rotated tensor in its type."""
        source = self.source(name)
        stored, dtype = self._checkpoint.read(source), self._checkpoint.tensors[source].dtype
        values = self._floats(source)
        rotated = self._in_heads(name, self._in_stream(name, values))
        return stored if rotated is values else convert_floats(rotated.astype(np.float32), "f32", dtype)

    def _in_stream(self, name: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Apply R1."""
        if self._r1 is None:
            return values
        if name in self._norms.values():
            return np.ones_like(values)
        if name in self._norms:
            return self._r1(values * self._floats(self._norms[name]))
        if name == _EMBEDDING:
            return self._r1(values)
        if _layer_of(name) in _WRITERS:
            return np.ascontiguousarray(self._r1(np.ascontiguousarray(values.T)).T)
        return values

    def _in_heads(self, name: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Apply R2."""
        if self._r2 is None or _layer_of(name) not in ("self_attn.v_proj", "self_attn.o_proj"):
            return values
        if _layer_of(name) == "self_attn.o_proj":
            reads_heads = name.endswith(".weight")
            return self._r2(values.reshape(-1, self._head_dim)).reshape(values.shape) if reads_heads else values
        by_head = np.moveaxis(values.reshape(-1, self._head_dim, *values.shape[1:]), 1, -1)
        return np.ascontiguousarray(np.moveaxis(self._r2(np.ascontiguousarray(by_head)), -1, 1)).reshape(values.shape)


def _layer_of(name: str) -> str:
    """Return the last two modules of a tensor's name, "mlp.down_proj"."""
    return ".".join(name.split(".")[-3:-1])


def rotate_checkpoint(source: Path | str, out: Path | str, rotation: str) -> None:
    """Write the folder ``out``, which must not exist: the same network with rotated weights, in the same types.

    ``rotation``: one of ``ROTATIONS``.  R1 gives a head that is tied to the embedding a weight of its own, because the
    weights of the last norm are folded into it.  Raises UnsupportedError for a family that is not in ``FAMILIES``, and
    for weights that are integers.
    """
    check_choice("rotate", rotation, ROTATIONS)
    check_new_folder(Path(out))
    family = Checkpoint.open(source).config.values.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedError(
            f"rotate: expected a model of {', '.join(FAMILIES)}, whose norms can be folded, got {family!r:.60}; "
            "--scheme w8a8_h32 rotates without folding",
            param="rotate",
        )
    checkpoint = open_mapped(source)
    check_float_weights(checkpoint)
    side_files = checkpoint.side_files()
    if "r1" in rotation and (POOLING_FILE in side_files or _EMBEDDING not in checkpoint.tensors):
        raise UnsupportedError(
            "rotate: expected r2 for a model of vectors, scores or classes, because r1 rotates the rows that it reads, "
            f"got {rotation}",
            param="rotate",
        )
    rotated = _Rotation(checkpoint, rotation)
    infos = {name: checkpoint.tensors[rotated.source(name)] for name in rotated.names}
    config = {name: value for name, value in checkpoint.config.values.items() if name != "quantization_config"}
    config[ROTATION_KEY] = rotation
    if rotated.is_untied:
        config["tie_word_embeddings"] = False
    side_files["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    with new_folder(Path(out)) as folder:
        write_side_files(folder, side_files)
        entries = [TensorEntry(name, info.dtype.upper(), info.shape) for name, info in infos.items()]
        writer = TensorWriter(folder / "model.safetensors", entries)
        for name in rotated.names:
            writer.add(name, rotated.tensor(name))
        writer.close()


@contextlib.contextmanager
def rotated_folder(source: Path | str, final: Path, rotation: str) -> Iterator[Path]:
    """Rotate a checkpoint into a hidden folder beside ``final``, which is removed when the block has succeeded.

    A run that was killed leaves it, and the next one for the same files takes it: what it finished belongs to the files
    in there.  ``resumable_output``, around this block, removes the folder after an exception if nothing was finished.
    """
    check_new_folder(final)
    work = Workspace(final, {"rotate": rotation}, open_mapped(source), ROTATED)
    if not work.rotated.is_dir():
        rotate_checkpoint(source, work.rotated, rotation)
    yield work.rotated
    work.remove()
