"""Writes a checkpoint that computes the same as another one, but has outliers where quantization suffers from them.

    python benchmarks/plant_outliers.py demo/model OUT [--kinds channels,keys,down,values] [--factor 32] [--share 0.01]
        [--seed 0]

Each kind multiplies some values by a factor, and divides by it where they are read:

- channels: elements of both norms of a layer, and the columns of q, k and v, or of gate and up, that read them;
- keys: pairs of dimensions that are rotated together, of a KV head, and the queries of its heads;
- down: rows of up, and the columns of down that read them;
- values: rows of v, and the columns of o that read them in every head of the group.

The factor is a power of two, so that weights and float logits keep their bits.  Models without outliers, such as the
demo model, cannot show what smoothing and rotations are for; the written one can: ``penstock eval OUT --scheme w8a8
--against OUT --against-scheme f32``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.float_types import convert_floats, to_float32
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.side_files import write_side_files
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.quant.folder import new_folder
from penstock.quant.tensor_writer import TensorEntry, TensorWriter

KINDS = ("channels", "keys", "down", "values")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose norms multiply by their weights, and whose layers have these names."""
NORMS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
Tensors = dict[str, NDArray[np.float32]]


class Planting:
    """The tensors of a model, which outliers are planted into."""

    def __init__(self, tensors: Tensors, config: dict[str, int], factor: float, share: float, seed: int) -> None:
        self.tensors, self.config, self.factor, self.share = tensors, config, np.float32(factor), share
        self._random = np.random.default_rng(seed)
        self.planted: dict[str, list[int]] = {}
        """What was planted: the numbers of elements, rows or pairs, by the tensor that was multiplied."""

    def plant(self, kinds: Iterable[str]) -> None:
        """Plant the kinds into every layer, in the order of KINDS."""
        for layer in range(self.config["layers"]):
            for kind in (kind for kind in KINDS if kind in kinds):
                getattr(self, f"_{kind}")(f"model.layers.{layer}.")

    def _pick(self, name: str, size: int) -> NDArray[np.int64]:
        picked = np.sort(self._random.choice(size, max(1, round(self.share * size)), replace=False))
        self.planted[name] = picked.tolist()
        return picked

    def _channels(self, layer: str) -> None:
        for norm, readers in NORMS.items():
            name = f"{layer}{norm}.weight"
            picked = self._pick(name, len(self.tensors[name]))
            self.tensors[name][picked] *= self.factor
            for reader in readers:
                self.tensors[f"{layer}{reader}.weight"][:, picked] /= self.factor

    def _down(self, layer: str) -> None:
        up, down = f"{layer}mlp.up_proj", f"{layer}mlp.down_proj.weight"
        picked = self._pick(up, len(self.tensors[f"{up}.weight"]))
        self._scale_rows(up, picked, self.factor)
        self.tensors[down][:, picked] /= self.factor

    def _keys(self, layer: str) -> None:
        if f"{layer}self_attn.k_norm.weight" in self.tensors:
            raise UnsupportedError("kinds: keys: expected a model without a norm of its keys", param="kinds")
        dim, heads = self.config["head_dim"], self.config["heads"] // self.config["kv_heads"]
        half = dim // 2
        picked = self._pick(f"{layer}self_attn.k_proj", half * self.config["kv_heads"])
        for pair in picked:
            head, at = divmod(int(pair), half)
            self._scale_rows(f"{layer}self_attn.k_proj", [head * dim + at, head * dim + at + half], self.factor)
            rows = [q * dim + i for q in range(head * heads, (head + 1) * heads) for i in (at, at + half)]
            self._scale_rows(f"{layer}self_attn.q_proj", rows, 1 / self.factor)

    def _values(self, layer: str) -> None:
        dim, heads = self.config["head_dim"], self.config["heads"] // self.config["kv_heads"]
        picked = self._pick(f"{layer}self_attn.v_proj", dim * self.config["kv_heads"])
        self._scale_rows(f"{layer}self_attn.v_proj", picked, self.factor)
        for row in picked:
            head, at = divmod(int(row), dim)
            columns = [q * dim + at for q in range(head * heads, (head + 1) * heads)]
            self.tensors[f"{layer}self_attn.o_proj.weight"][:, columns] /= self.factor

    def _scale_rows(self, name: str, rows: Iterable[int], factor: float) -> None:
        for part in ("weight", "bias"):
            if (tensor := self.tensors.get(f"{name}.{part}")) is not None:
                tensor[list(rows)] *= np.float32(factor)


def read_sizes(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the sizes that planting needs; UnsupportedError for another family."""
    values = checkpoint.config.values
    if values.get("model_type") not in FAMILIES:
        raise UnsupportedError(
            f"model: expected one of {', '.join(FAMILIES)}, got {values.get('model_type')}", param="model"
        )
    heads = int(values["num_attention_heads"])
    return {
        "layers": int(values["num_hidden_layers"]),
        "heads": heads,
        "kv_heads": int(values.get("num_key_value_heads") or heads),
        "head_dim": int(values.get("head_dim") or values["hidden_size"] // heads),
    }


def plant_outliers(
    folder: Path, out: Path, kinds: Iterable[str] = KINDS, factor: float = 32.0, share: float = 0.01, seed: int = 0
) -> dict[str, list[int]]:
    """Write the folder ``out``, and return what was planted by tensor or linear."""
    kinds = tuple(kinds)
    if not kinds or not set(kinds) <= set(KINDS):
        raise InvalidArgumentError(f"kinds: expected some of {', '.join(KINDS)}, got {', '.join(kinds)}", param="kinds")
    if not (factor > 0 and math.frexp(factor)[0] == 0.5):
        raise InvalidArgumentError(f"factor: expected a power of two, got {factor:g}", param="factor")
    if not 0 < share <= 1:
        raise InvalidArgumentError(f"share: expected a number above 0 and at most 1, got {share:g}", param="share")
    checkpoint = Checkpoint.open(folder)
    sizes = read_sizes(checkpoint)
    infos = checkpoint.tensors
    tensors = {name: to_float32(checkpoint.read(name), info.dtype).copy() for name, info in infos.items()}
    planting = Planting(tensors, sizes, factor, share, seed)
    planting.plant(kinds)
    with new_folder(out) as new:
        write_side_files(new, checkpoint.side_files())
        entries = [TensorEntry(name, info.dtype.upper(), info.shape) for name, info in infos.items()]
        writer = TensorWriter(new / "model.safetensors", entries)
        for name, info in infos.items():
            writer.add(name, convert_floats(tensors[name], "f32", info.dtype))
        writer.close()
    return planting.planted


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant outliers into a checkpoint without changing its function.")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"some of {','.join(KINDS)} (default: all)")
    parser.add_argument("--factor", type=float, default=32.0, help="a power of two (default: 32)")
    parser.add_argument("--share", type=float, default=0.01, help="of channels, pairs and rows (default: 0.01)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    planted = plant_outliers(args.model, args.out, args.kinds.split(","), args.factor, args.share, args.seed)
    print(f"{args.out}: {sum(map(len, planted.values()))} outliers in {len(planted)} tensors, factor {args.factor:g}")


if __name__ == "__main__":
    main()
