"""Checkpoint to quantized checkpoint, without PyTorch: what ``penstock quantize`` runs.

The result is a folder that loads wherever a checkpoint does.  A linear weight ``X.weight`` becomes integers with
their scales in ``X.weight_scale``; everything else is copied as it is.  docs/quantization.md describes the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.config import show
from penstock.errors import FileAccessError, InvalidArgumentError, UnsupportedError
from penstock.lite.core import Context
from penstock.models.checkpoint import QUANTIZED_VERSION, Checkpoint
from penstock.quant.matrix import quantize_rows, scale_shape, stored_values
from penstock.quant.scheme import SCHEMES, Scheme, find_scheme
from penstock.quant.tensor_writer import TensorEntry, TensorWriter

__all__ = ["QuantizeReport", "plan_weights", "quantize_checkpoint"]

HEAD_NAME: Final = "lm_head.weight"
EMBEDDING_WORDS: Final = ("embed", "wte", "wpe")
FLOATS: Final = ("f32", "f16", "bf16")
QuantizeProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class QuantizeReport:
    """What was done: sizes in bytes."""

    scheme: str
    num_quantized: int
    source_bytes: int
    num_bytes: int
    seconds: float


def quantized_scheme(name: str) -> Scheme:
    """The scheme called ``name`` if it quantizes; InvalidArgumentError lists those that do."""
    scheme = find_scheme(name)
    if not scheme.quantized:
        names = ", ".join(scheme.name for scheme in SCHEMES.values() if scheme.quantized)
        raise InvalidArgumentError(f"scheme: expected one of {names}, found {name!r}, which does not quantize")
    return scheme


def plan_weights(checkpoint: Checkpoint, scheme: Scheme) -> dict[str, Scheme]:
    """Which tensors are quantized, and how: every float matrix ``X.weight`` but embeddings.

    An embedding that is also the output head is quantized as the head is.
    """
    head = find_scheme(scheme.head)
    tied = checkpoint.config.bool("tie_word_embeddings", HEAD_NAME not in checkpoint.tensors)
    plan = {}
    for name, info in checkpoint.tensors.items():
        if len(info.shape) != 2 or info.dtype not in FLOATS or not name.endswith(".weight") or 0 in info.shape:
            continue
        layer = name.removesuffix(".weight").rpartition(".")[2]
        if any(word in layer for word in EMBEDDING_WORDS):
            if tied and layer == "embed_tokens":
                plan[name] = head
            continue
        plan[name] = head if name == HEAD_NAME else scheme
    return plan


def _entries(checkpoint: Checkpoint, plan: dict[str, Scheme]) -> list[TensorEntry]:
    entries = []
    for name, info in checkpoint.tensors.items():
        scheme = plan.get(name)
        if scheme is None:
            if info.dtype not in FLOATS:
                raise UnsupportedError(f"{info.file}: tensor {show(name)}: dtype {info.dtype.upper()} is not supported")
            entries.append(TensorEntry(name, info.dtype.upper(), info.shape))
            continue
        if f"{name}_scale" in checkpoint.tensors:
            raise UnsupportedError(
                f"{info.file}: has a tensor {show(name + '_scale')}: its weights are quantized already"
            )
        rows, cols = info.shape
        four_bit = scheme.weight_bits == 4
        entries.append(TensorEntry(name, *(("U8", (rows, -(-cols // 2))) if four_bit else ("I8", (rows, cols)))))
        entries.append(TensorEntry(f"{name}_scale", "F16" if four_bit else "F32", scale_shape(scheme, rows, cols)))
    return entries


def quantize_checkpoint(
    source: Path | str, out: Path | str, scheme: str, progress: QuantizeProgress | None = None
) -> QuantizeReport:
    """Write the folder ``out``, which must not exist, from the checkpoint folder ``source``.

    ``progress(done, total)`` counts bytes of source.  The folder appears whole or not at all.  Raises what
    ``Checkpoint.open`` raises, InvalidArgumentError for a scheme that does not quantize or an ``out`` that exists.
    """
    begun = time.monotonic()
    chosen = quantized_scheme(scheme)
    final = Path(out)
    if final.exists() or final.is_symlink():
        raise InvalidArgumentError(f"{final}: expected a folder that does not exist yet")
    checkpoint = Checkpoint.open(source)
    if checkpoint.scheme is not None:
        raise UnsupportedError(f"{source}: is quantized already ({checkpoint.scheme}); use the original checkpoint")
    plan = plan_weights(checkpoint, chosen)
    total = sum(info.num_bytes for info in checkpoint.tensors.values())
    side_files = checkpoint.side_files()
    side_files["config.json"] = quantized_config(checkpoint.config.values, chosen.name, checkpoint.dtype)
    with new_folder(final) as folder:
        for name, data in side_files.items():
            (folder / name).write_bytes(data)
        writer = TensorWriter(folder / "model.safetensors", _entries(checkpoint, plan))
        done = 0
        with Context() as context:
            for name, info in checkpoint.tensors.items():
                _write_tensor(writer, context, checkpoint, name, plan.get(name))
                checkpoint.release(name)
                done += info.num_bytes
                if progress is not None:
                    progress(done, total)
        num_bytes = writer.close()
    return QuantizeReport(chosen.name, len(plan), total, num_bytes, time.monotonic() - begun)


def _write_tensor(
    writer: TensorWriter, context: Context, checkpoint: Checkpoint, name: str, scheme: Scheme | None
) -> None:
    data = checkpoint.read(name)
    if scheme is None:
        writer.add(name, data)
        return
    for values, scales in quantize_rows(context, scheme, data, checkpoint.tensors[name].dtype):
        add_quantized(writer, name, scheme, values, scales)


def add_quantized(
    writer: TensorWriter, name: str, scheme: Scheme, values: NDArray[np.int8], scales: NDArray[np.float32]
) -> None:
    """Rows of a quantized weight and their scales, as the folder stores them."""
    writer.add(name, stored_values(scheme, values))
    writer.add(f"{name}_scale", scales.astype(np.float16) if scheme.weight_bits == 4 else scales)


def quantized_config(config: dict[str, Any], scheme: str, dtype: str) -> bytes:
    """config.json of the quantized folder: the original's, and how it was quantized."""
    section = {"quant_method": "penstock", "version": QUANTIZED_VERSION, "scheme": scheme, "dtype": dtype}
    return (json.dumps(config | {"quantization_config": section}, indent=2) + "\n").encode()


@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A folder that becomes ``final`` when the block ends well, and vanishes when it does not."""
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".partial", dir=final.parent))
    except OSError as error:
        raise FileAccessError(f"{final.parent}: {error.strerror}") from None
    try:
        yield temporary
        temporary.chmod(0o755)
        if final.exists():
            raise InvalidArgumentError(f"{final}: expected a folder that does not exist yet")
        os.rename(temporary, final)
    except OSError as error:
        if isinstance(error, FileAccessError):
            raise
        raise FileAccessError(f"{final}: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
