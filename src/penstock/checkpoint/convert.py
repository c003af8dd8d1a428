"""Write a checkpoint folder again: in another float type, with linears split or fused, with an adapter added.

Tensors stream in runs of rows, so memory use does not depend on the model.  Everything else stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.float_types import FLOATS, convert_floats, to_float32
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.fused_layout import LAYOUTS, RowRange, Target, fused_config, keep, rearrange
from penstock.checkpoint.lora import Adapter
from penstock.checkpoint.own_layout import Arrangement
from penstock.checkpoint.side_files import write_side_files
from penstock.checkpoint.tensor_file import TensorFile
from penstock.config import check_choice, check_integer, show
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.quant.folder import new_folder
from penstock.quant.tensor_writer import TensorEntry, TensorWriter

__all__ = ["Conversion", "ConvertReport", "convert_checkpoint"]

_CONFIG_NAMES: Final = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_BLOCKS_OF_COLUMNS: Final = ("q4_k", "q6_k")
"""Types of a GGUF file whose integers are chosen by the errors of columns."""
_PIECE_VALUES: Final = 1 << 21
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Conversion:
    """The options of a conversion.

    ``dtype``: the type of all floats ("f32", "f16", "bf16"; in a GGUF file also "q8_0", "q6_k" and "q4_k"), or None.
    ``layout``: "split" or "fused" linears, or None.  ``lora``: a folder with an adapter in peft's layout, or None.
    ``max_file_mb``: the size of a file of weights, in millions of bytes, that is not exceeded unless by one tensor; 0
    writes one file.  ``format``: "compressed-tensors" for a folder of ``penstock quantize``, without other options; or
    None.  ``imatrix``: an importance matrix, in a GGUF file of "q4_k" or "q6_k", or None.
    """

    dtype: str | None = None
    layout: str | None = None
    lora: Path | None = None
    max_file_mb: int = 0
    format: str | None = None
    imatrix: Path | None = None

    def __post_init__(self) -> None:
        """Refuse a wrong value, by name."""
        if self.dtype is not None:
            check_choice("dtype", self.dtype, (*FLOATS, "q8_0", "q6_k", "q4_k"))
        if self.layout is not None:
            check_choice("layout", self.layout, LAYOUTS)
        check_integer("max_file_mb", self.max_file_mb, 0, 1 << 30)
        if self.imatrix is not None and self.dtype not in _BLOCKS_OF_COLUMNS:
            expected = " or ".join(_BLOCKS_OF_COLUMNS)
            raise InvalidArgumentError(
                f"imatrix: expected a dtype of {expected} with it, got {self.dtype or 'none'}", param="imatrix"
            )
        if self.format is not None:
            check_choice("format", self.format, ("compressed-tensors",))


@dataclass(frozen=True)
class ConvertReport:
    """The result: tensors, their bytes, their files; ``num_changed`` weights have the adapter's change.

    ``note``: tensors of a GGUF file that have another type than the rest; "" for none.
    """

    num_tensors: int
    num_bytes: int
    num_files: int
    num_changed: int
    note: str = ""


def convert_checkpoint(
    checkpoint: Checkpoint,
    out: Path,
    conversion: Conversion,
    side_files: Mapping[str, bytes],
    progress: Progress | None = None,
    arrangement: Arrangement | None = None,
) -> ConvertReport:
    """Write the folder ``out``, which must not exist; it appears complete or not at all.

    ``side_files``: those to write beside the weights; config.json is changed as needed.  ``progress(done, total)``
    counts bytes of what is read.  ``arrangement``: the conversion's layout of a network that declares where its
    parameters come from; None is that of ``fused_layout``.  Raises UnsupportedError or InvalidFileError, which name the
    field or the tensor.
    """
    if checkpoint.scheme is not None and (conversion.dtype is not None or conversion.lora is not None):
        name = "dtype" if conversion.dtype is not None else "lora"
        raise UnsupportedError(
            f"{name}: expected float weights, got a folder quantized as {checkpoint.scheme}", param=name
        )
    if conversion.dtype is not None and conversion.dtype not in FLOATS:
        raise InvalidArgumentError(
            f"dtype: expected one of {', '.join(FLOATS)}, got {conversion.dtype}, which only a GGUF file can have. "
            "`penstock quantize` writes folders of 8 bit.",
            param="dtype",
        )
    adapter = Adapter({}) if conversion.lora is None else Adapter.open(conversion.lora)
    adapter.check(checkpoint.tensors)
    config, targets = dict(checkpoint.config.values), keep(checkpoint.tensors)
    if arrangement is not None:
        config, targets = dict(arrangement.config), arrangement.targets
    elif conversion.layout is not None:
        config = fused_config(conversion.layout, checkpoint.config)
        targets = rearrange(conversion.layout, checkpoint.config, checkpoint.tensors)
    if conversion.dtype is not None:
        key = "dtype" if "dtype" in config else "torch_dtype"
        config[key] = _CONFIG_NAMES[conversion.dtype]
    sides = dict(side_files)
    if config != checkpoint.config.values:
        sides["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    files = _divide(targets, conversion)
    with new_folder(out) as folder:
        write_side_files(folder, sides)
        writing = _Writing(checkpoint, adapter, conversion.dtype, progress)
        num_bytes = sum(writing.write(folder / name, own) for name, own in files.items())
        if len(files) > 1:
            weight_map = {tensor: name for name, own in files.items() for tensor in own}
            index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        Checkpoint.open(folder)
    return ConvertReport(len(targets), num_bytes, len(files), len(adapter))


def _dtype_of(target: Target, dtype: str | None) -> str:
    return dtype if dtype is not None and target.dtype in FLOATS else target.dtype


def _divide(targets: Mapping[str, Target], conversion: Conversion) -> dict[str, dict[str, Target]]:
    """Return the tensors of each file, in their order."""
    limit, groups, filled = conversion.max_file_mb * 1_000_000, [{}], 0  # type: ignore[var-annotated]
    for name, target in targets.items():
        size = TensorEntry(name, _dtype_of(target, conversion.dtype).upper(), target.shape).num_bytes
        if limit and groups[-1] and filled + size > limit:
            groups.append({})
            filled = 0
        groups[-1][name] = target
        filled += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


class _Writing:
    """Writes tensors from a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, adapter: Adapter, dtype: str | None, progress: Progress | None) -> None:
        self._checkpoint, self._adapter, self._dtype = checkpoint, adapter, dtype
        self._files: dict[str, TensorFile] = {n: file for file in checkpoint.tensor_files for n in file.tensors}
        self._total, self._done = sum(info.num_bytes for info in checkpoint.tensors.values()), 0
        self._progress = progress

    def write(self, path: Path, targets: Mapping[str, Target]) -> int:
        """Write a file; return the bytes of its tensors."""
        entries = [TensorEntry(name, _dtype_of(own, self._dtype).upper(), own.shape) for name, own in targets.items()]
        writer = TensorWriter(path, entries)
        for name, target in targets.items():
            for piece in target.pieces:
                for rows in self._rows(piece, _dtype_of(target, self._dtype)):
                    writer.add(name, rows)
        writer.close()
        return sum(entry.num_bytes for entry in entries)

    def _rows(self, piece: RowRange, dtype: str) -> Iterator[NDArray[Any]]:
        """Yield the rows of a piece as they are written, and release what was read."""
        info, file = self._checkpoint.tensors[piece.name], self._files[piece.name]
        num_rows = info.shape[0] if info.shape else 1
        row_bytes = info.num_bytes // num_rows if num_rows else 0
        changed = piece.name in self._adapter
        step = max(1, 4 * _PIECE_VALUES // max(row_bytes, 1))
        for start in range(piece.start, piece.stop, step):
            stop = min(piece.stop, start + step)
            if not changed and info.dtype == dtype:
                yield file.read_bytes(piece.name, start * row_bytes, stop * row_bytes)
            else:
                yield self._converted(piece.name, start, stop, dtype, changed)
            file.release(piece.name, start * row_bytes, stop * row_bytes)
            self._done += (stop - start) * row_bytes
            if self._progress is not None:
                self._progress(self._done, self._total)

    def _converted(self, name: str, start: int, stop: int, dtype: str, changed: bool) -> NDArray[Any]:
        info = self._checkpoint.tensors[name]
        stored = self._checkpoint.read(name)
        rows, source = stored[start:stop] if info.shape else stored.reshape(1), info.dtype
        if changed:
            rows, source = np.ascontiguousarray(self._adapter.add(name, to_float32(rows, source), start)), "f32"
        try:
            return convert_floats(rows, source, dtype)
        except InvalidArgumentError as error:
            raise InvalidFileError(f"{info.file}: tensor {show(name)}: {error}", param=name) from None
