"""The inputs and outputs of a general network as the types of a servable."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from penstock.core import layouts, native
from penstock.core.predict import GENERAL_NETWORK, NetworkValue, network_inputs, network_outputs
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.servables.api.specs import Spec

__all__ = ["datatype_of", "signature_of"]

_DATATYPES: Final = {
    layouts.F32: "FP32",
    layouts.F16: "FP16",
    layouts.BF16: "BF16",
    layouts.I8: "INT8",
    layouts.I32: "INT32",
    layouts.U8: "UINT8",
    layouts.I64: "INT64",
    layouts.BOOL: "BOOL",
}


def datatype_of(value: NetworkValue) -> str:
    """Return the protocol's name of the datatype of an input or output."""
    return _DATATYPES[value.dtype]


def signature_of(path: Path) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """Return the types of one instance that a bundle takes and returns, by name.

    Raises InvalidArgumentError for a network without a batch axis, UnsupportedError for a language model, and
    InvalidFileError or FileAccessError for a file that cannot be read.
    """
    with native.Model.open(path) as model:
        if model.info.kind != GENERAL_NETWORK:
            raise UnsupportedError(
                f"{path.name}: expected a general network, got a language model; declare it with "
                "servable.language_model",
                param="path",
            )
        return _specs(path, network_inputs(model)), _specs(path, network_outputs(model))


def _specs(path: Path, values: Sequence[NetworkValue]) -> dict[str, Spec]:
    for value in values:
        if not value.sizes:
            raise InvalidArgumentError(
                f"{path.name}: {value.name}: expected a tensor with the batch first, got a number without dimensions",
                param=value.name,
            )
    return {value.name: Spec(datatype_of(value), value.shape[1:]) for value in values}
