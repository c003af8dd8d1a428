"""How a quantized folder stores its weights, and how the folder appears: whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FileAccessError, InvalidArgumentError, PenstockError
from penstock.quant.matrix import scale_shape, stored_values
from penstock.quant.scheme import Scheme
from penstock.quant.tensor_writer import TensorEntry, TensorWriter

__all__ = ["QUANTIZED_VERSION", "add_quantized", "new_folder", "quantized_config", "quantized_entries"]

QUANTIZED_VERSION: Final = 1


def quantized_entries(name: str, scheme: Scheme, rows: int, cols: int) -> list[TensorEntry]:
    """The two tensors that a quantized weight becomes."""
    if scheme.weight_bits == 4:
        stored, scale = TensorEntry(name, "U8", (rows, -(-cols // 2))), "F16"
    else:
        stored, scale = TensorEntry(name, "I8", (rows, cols)), "F32"
    return [stored, TensorEntry(f"{name}_scale", scale, scale_shape(scheme, rows, cols))]


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
    _check_new(final)
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".partial", dir=final.parent))
    except OSError as error:
        raise FileAccessError(f"{final.parent}: {error.strerror}") from None
    try:
        yield temporary
        temporary.chmod(0o755)
        _check_new(final)
        os.rename(temporary, final)
    except PenstockError:
        raise
    except OSError as error:
        raise FileAccessError(f"{final}: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_new(final: Path) -> None:
    if final.exists() or final.is_symlink():
        raise InvalidArgumentError(f"{final}: expected a folder that does not exist yet")
