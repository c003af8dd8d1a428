"""A checkpoint in several schemes, from which folders with a scheme for each weight are put together."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from penstock.calibration.quantize import DataOptions, quantize_with_data
from penstock.calibration.texts import CalibrationData
from penstock.checkpoint.folder import Checkpoint, WeightFile
from penstock.checkpoint.quantize import head_blocks, plan_weights, quantize_checkpoint
from penstock.checkpoint.side_files import write_side_files
from penstock.checkpoint.tensor_file import TensorFile, TensorInfo
from penstock.config import ConfigReader
from penstock.core.layouts import BLOCKS
from penstock.core.native import Context
from penstock.errors import InvalidArgumentError
from penstock.quant.folder import add_quantized, new_folder, quantized_entries
from penstock.quant.matrix import quantize_rows
from penstock.quant.mixed_schemes import HEAD_BLOCKS, HEADS, is_head, mixed_config, other_schemes
from penstock.quant.scheme import Scheme, find_scheme, quantizing_scheme
from penstock.quant.tensor_writer import TensorEntry, TensorWriter
from penstock.runtime.build import ProgressCallback

__all__ = ["IN_PLACE", "METHODS", "Levels", "default_levels", "make_levels", "write_checkpoint"]

IN_PLACE: Final = ("rtn", "imatrix", "gptq")
"""The methods that leave all other tensors as they are, so that floats of the source fit beside their results."""
METHODS: Final = (*IN_PLACE, "smooth", "smooth+imatrix", "smooth+gptq")
"""The methods whose other tensors are the same under every scheme."""
_LADDERS: Final = {
    "w4a8": ("w4a8", "w8a8"),
    "w4a16": ("w4a16", "w8a16"),
    "w8a8": ("w8a8", "bf16"),
    "w8a16": ("w8a16", "bf16"),
    "w4a8_h32": ("w4a8_h32", "w8a8_h32"),
    "w8a8_h32": ("w8a8_h32", "bf16"),
}


def default_levels(scheme: str, dtype: str) -> tuple[str, ...]:
    """Return the schemes that a unit may have, by the lowest one and the element type of the checkpoint."""
    return tuple(dtype if name == "bf16" else name for name in _LADDERS[quantizing_scheme(scheme).name])


class _LevelPart:
    """Some tensors of an open file or checkpoint, as a file of weights."""

    def __init__(self, home: WeightFile | Checkpoint, names: Collection[str]) -> None:
        self.path = home.folder if isinstance(home, Checkpoint) else home.path
        self._home = home
        self.tensors: Mapping[str, TensorInfo] = {name: home.tensors[name] for name in names}

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor in its shape."""
        return self._home.read(name)

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Release the memory pages of bytes ``begin`` to ``end`` of a tensor."""
        self._home.release(name, begin, end)


@dataclass(frozen=True)
class Levels:
    """A source in several schemes, the lowest first.

    ``folders``: by scheme the quantized folder of all weights, or the source for a float scheme.  ``head``: the name of
    the head, and by scheme files of it in 4 bits and in blocks, which no folder has, if the lowest scheme has 4 bits.
    """

    schemes: tuple[str, ...]
    folders: Mapping[str, Checkpoint]
    head: tuple[str, Mapping[str, TensorFile]] | None
    recipe: Mapping[str, Any]

    @property
    def base(self) -> Checkpoint:
        """The folder of the lowest scheme."""
        return self.folders[self.schemes[0]]

    def schemes_of(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the schemes that tensors may have together, the lowest first: those of the head differ."""
        lowest = find_scheme(self.schemes[0])
        if lowest.weight_bits == 8 or not any(self.base.tensors[name].dtype == "i8" for name in names):
            return self.schemes
        own = [] if self.head is None or [self.head[0]] != [*names] else [*self.head[1]]
        return (*own, *self.schemes[1:])

    def quantized_names(self) -> set[str]:
        """Return the tensors that are integers in the lowest scheme."""
        return {name for name in self.base.tensors if self.base.is_quantized(name)}

    def compose(self, schemes: Mapping[str, str], recipe: Mapping[str, Any] | None = None) -> Checkpoint:
        """Return the checkpoint in which each of the tensors has a scheme; other tensors are those of the lowest."""
        homes: list[WeightFile] = []
        taken: set[str] = set()
        for scheme in (*self.schemes, HEAD_BLOCKS):
            own = {name for name, chosen in schemes.items() if chosen == scheme}
            taken |= own.union(*(self.base.companions(name) for name in own))
            if self.head is not None and self.head[0] in own and scheme in self.head[1]:
                file = self.head[1][scheme]
                homes.append(_LevelPart(file, _with_companions(file, {self.head[0]})))
                own -= {self.head[0]}
            if own:
                homes.append(_LevelPart(self.folders[scheme], _with_companions(self.folders[scheme], own)))
        homes.append(_LevelPart(self.base, [name for name in self.base.tensors if name not in taken]))
        config = self.base.stored_config
        values = mixed_config(config.values, self.schemes[0], self._listed(schemes))
        if recipe is not None:
            values["quantization_config"] = {**values["quantization_config"], "recipe": dict(recipe)}
        return Checkpoint(self.base.folder, ConfigReader(values, config.file), homes)

    def _listed(self, schemes: Mapping[str, str]) -> dict[str, str]:
        """Return the table of config.json: tensors above the lowest level, and heads that ``is_head`` does not know."""
        lowest = self.schemes[0]
        own = {
            name: find_scheme(scheme).plain if is_head(name) or name in HEADS else scheme
            for name, scheme in schemes.items()
        }
        unnamed = other_schemes(lowest, {name: scheme for name, scheme in own.items() if schemes[name] == lowest})
        return {name: scheme for name, scheme in own.items() if schemes[name] != lowest or name in unnamed}


def _with_companions(home: WeightFile | Checkpoint, names: Collection[str]) -> list[str]:
    ends = ("", "_scale", "_groups")
    return [f"{name}{end}" for name in sorted(names) for end in ends if f"{name}{end}" in home.tensors]


def make_levels(
    source: Path,
    checkpoint: Checkpoint,
    work: Path,
    schemes: Sequence[str],
    method: str,
    data: tuple[CalibrationData, int],
    progress: ProgressCallback | None = None,
) -> Levels:
    """Quantize a checkpoint in each of the schemes to folders in ``work``, unless they exist.

    ``data``: the sequences for the method, and the number of threads.
    """
    folders: dict[str, Checkpoint] = {}
    recipe: Mapping[str, Any] = {"method": method}
    for scheme in schemes:
        if not find_scheme(scheme).quantized:
            folders[scheme] = checkpoint
            continue
        out = work / scheme
        if not out.is_dir():
            if method == "rtn":
                quantize_checkpoint(checkpoint, out, scheme)
            else:
                quantize_with_data(source, out, scheme, DataOptions(method, threads=data[1], data=data[0]), progress)
        folders[scheme] = Checkpoint.open(out)
        own = json.loads((out / "config.json").read_text())["quantization_config"].get("recipe")
        recipe = own if own is not None and scheme == schemes[0] else recipe
    _check_others(folders[schemes[0]], folders)
    head = _low_heads(checkpoint, work, schemes[0]) if method in IN_PLACE else None
    return Levels(tuple(schemes), folders, head, recipe)


def _check_others(base: Checkpoint, folders: Mapping[str, Checkpoint]) -> None:
    """Check that tensors which are floats in every scheme are the same, so that weights of several fit together."""
    for scheme, other in folders.items():
        for name, info in base.tensors.items():
            is_float = info.dtype in ("f32", "f16", "bf16") and not name.endswith("_scale")
            if is_float and name in other.tensors and base.read(name).tobytes() != other.read(name).tobytes():
                raise InvalidArgumentError(
                    f"method: expected one that leaves {name} as it is, got other values of it under {scheme}; use one "
                    f"of {', '.join(IN_PLACE)}",
                    param="method",
                )


def _low_heads(checkpoint: Checkpoint, work: Path, scheme: str) -> tuple[str, Mapping[str, TensorFile]] | None:
    """Round the head to 4 bits and, if its columns are whole ones, to blocks, which a folder of 4 bits does not.

    Returns its name and its files by scheme; None for 8 bits.
    """
    row = find_scheme(scheme)
    unread = checkpoint.redundant_names()
    plan = plan_weights(checkpoint, row)
    names = [name for name, own in plan.items() if own.layout != row.layout and name not in unread]
    if row.weight_bits != 4 or not names:
        return None
    name, files = names[0], {}
    blocks = find_scheme(HEAD_BLOCKS)
    has_blocks = checkpoint.tensors[name].shape[1] % BLOCKS[blocks.layout].block_len == 0
    for key, own in ((scheme, find_scheme(row.plain)), *([(HEAD_BLOCKS, blocks)] if has_blocks else [])):
        path = work / f"head-{key}.safetensors"
        if not path.exists():
            _write_head(checkpoint, name, own, path)
        files[key] = TensorFile(path)
    return name, files


def _write_head(checkpoint: Checkpoint, name: str, scheme: Scheme, path: Path) -> None:
    """Write a file of the head, rounded to nearest, which appears complete or not at all."""
    info, partial = checkpoint.tensors[name], path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    writer = TensorWriter(partial, quantized_entries(name, scheme, info.shape[0], info.shape[1]))
    if scheme.in_blocks:
        for blocks in head_blocks(checkpoint.read(name), info.dtype):
            writer.add(name, blocks)
    else:
        with Context() as context:
            for rows in quantize_rows(context, scheme, checkpoint.read(name), info.dtype):
                add_quantized(writer, name, scheme, rows)
    checkpoint.release(name)
    writer.close()
    partial.replace(path)


def write_checkpoint(checkpoint: Checkpoint, out: Path) -> int:
    """Write an open checkpoint as a folder, which appears complete or not at all; return the bytes of its weights."""
    with new_folder(out) as folder:
        write_side_files(folder, checkpoint.side_files())
        entries = [TensorEntry(name, info.dtype.upper(), info.shape) for name, info in checkpoint.tensors.items()]
        writer = TensorWriter(folder / "model.safetensors", entries)
        for name in checkpoint.tensors:
            writer.add(name, checkpoint.read(name))
            checkpoint.release(name)
        return writer.close()
