"""LoRA adapters in peft's layout, to be added to the weights that they were trained for.

W' = W + scale * B A, with A [r, in] and B [out, r] (Hu et al., LoRA, arXiv 2106.09685).  ``scale`` is alpha / r, or
alpha / sqrt(r) for rank-stabilized adapters (Kalajdzievski, arXiv 2312.03732).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.float_types import to_float32
from penstock.checkpoint.side_files import read_small_file
from penstock.checkpoint.tensor_file import TensorFile, TensorInfo
from penstock.config import ConfigReader, is_number, show
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError

__all__ = ["Adapter"]

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_ENDS: Final = {f".{kind}{adapter}.weight": kind for kind in ("lora_A", "lora_B") for adapter in ("", ".default")}
_READ: Final = frozenset(
    ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out",
     "lora_bias", "use_qalora", "init_lora_weights")
)  # fmt: skip
_WITHOUT_EFFECT: Final = frozenset(
    ("auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config",
     "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
     "lora_ga_config", "megatron_config", "megatron_core", "modules_to_save", "peft_version", "qalora_group_size",
     "revision", "runtime_config", "target_modules", "target_parameters", "task_type", "trainable_token_indices")
)  # fmt: skip
"""Keys of peft that say how an adapter is trained, or which layers it has (``_key_without``)."""
_PLAIN_STARTS: Final = (True, False, "gaussian", "eva", "orthogonal")
"""The values of ``init_lora_weights`` that leave the weights of the model as they are."""


@dataclass(frozen=True)
class _Delta:
    """``scale`` * B A, rank r."""

    a: NDArray[np.float32]
    b: NDArray[np.float32]
    scale: float


class Adapter:
    """The changes that an adapter makes, by the name of the weight."""

    def __init__(self, deltas: Mapping[str, _Delta]) -> None:
        self._deltas = dict(deltas)

    @classmethod
    def open(cls, folder: Path) -> Adapter:
        """Read and check an adapter folder.

        Raises InvalidArgumentError for another folder; InvalidFileError, which names the field or tensor; and
        UnsupportedError for an adapter that does more than add a product (DoRA, embeddings, biases, whole modules).
        """
        if not (folder / _CONFIG).exists():
            raise InvalidArgumentError(f"lora: {folder}: expected an adapter with {_CONFIG}, got no file", param="lora")
        reader = ConfigReader.parse(read_small_file(folder / _CONFIG), _CONFIG)
        if reader.str("peft_type", "LORA") != "LORA":
            raise UnsupportedError(
                f"{_CONFIG}: peft_type: expected LORA, got {show(reader.values['peft_type'])}", param="peft_type"
            )
        _check_keys(reader)
        if not (folder / _WEIGHTS).exists():
            raise InvalidFileError(f"{folder}: expected {_WEIGHTS}, got no file")
        file = TensorFile(folder / _WEIGHTS)
        pairs: dict[str, dict[str, NDArray[np.float32]]] = {}
        for name, info in file.tensors.items():
            end = next((end for end in _ENDS if name.endswith(end)), None)
            if end is None or not name.startswith(_PREFIX) or len(info.shape) != 2:
                raise UnsupportedError(
                    f"{_WEIGHTS}: tensor {show(name)}: expected matrices lora_A and lora_B of linear layers",
                    param=name,
                )
            module = name[len(_PREFIX) : -len(end)]
            if wrong := _key_without(reader, module):
                raise InvalidFileError(
                    f"{_CONFIG}: {wrong}: expected {show(module)}, of which {_WEIGHTS} has matrices; peft would leave "
                    "them out",
                    param=wrong,
                )
            if _ENDS[end] in pairs.get(module, ()):
                raise InvalidFileError(
                    f"{_WEIGHTS}: {show(module)}: expected {_ENDS[end]} once, got it with and without .default",
                    param=module,
                )
            values = to_float32(file.read(name), info.dtype)
            if not np.isfinite(values).all():
                raise InvalidFileError(f"{_WEIGHTS}: tensor {show(name)}: expected finite values", param=name)
            pairs.setdefault(module, {})[_ENDS[end]] = values
        return cls({f"{module}.weight": _delta(reader, module, pair) for module, pair in pairs.items()})

    def check(self, tensors: Mapping[str, TensorInfo]) -> None:
        """Raise InvalidFileError unless each change is of a float matrix of ``tensors`` and has its shape."""
        for name, delta in self._deltas.items():
            info = tensors.get(name)
            if info is None:
                raise InvalidFileError(f"{_WEIGHTS}: {show(name)}: the checkpoint has no such tensor", param=name)
            shape = (delta.b.shape[0], delta.a.shape[1])
            if info.shape != shape or info.dtype not in ("f32", "f16", "bf16"):
                raise InvalidFileError(
                    f"{_WEIGHTS}: {show(name)}: expected a float matrix of {list(shape)}, got {info.dtype} of "
                    f"{list(info.shape)}",
                    param=name,
                )

    def __contains__(self, name: str) -> bool:
        return name in self._deltas

    def __len__(self) -> int:
        return len(self._deltas)

    def add(self, name: str, rows: NDArray[np.float32], start: int) -> NDArray[np.float32]:
        """Return rows ``start``... of a weight, changed.  Raises InvalidFileError if finite values overflow."""
        delta = self._deltas[name]
        with np.errstate(over="ignore", invalid="ignore"):
            change = delta.b[start : start + len(rows)] @ delta.a
            result: NDArray[np.float32] = rows + np.float32(delta.scale) * change
        if not np.isfinite(result).all():
            raise InvalidFileError(f"{_WEIGHTS}: {show(name)}: the merged weight overflows", param=name)
        return result


def _check_keys(reader: ConfigReader) -> None:
    """Raise UnsupportedError for a key that changes what the adapter computes, unless its value says nothing."""
    for name in ("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora"):
        if reader.bool(name, False):
            raise UnsupportedError(f"{_CONFIG}: {name}: expected false, got true", param=name)
    start = reader.values.get("init_lora_weights")
    if start is not None and start not in _PLAIN_STARTS:  # others, such as pissa, change the weights themselves
        raise UnsupportedError(
            f"{_CONFIG}: init_lora_weights: expected true or gaussian, got {show(start)}; save the adapter with "
            "peft's path_initial_model_for_weight_conversion",
            param="init_lora_weights",
        )
    for name, value in reader.values.items():
        if name not in _READ | _WITHOUT_EFFECT and value not in (None, False, 0, "", [], {}):
            shown = show(name)[1:-1]
            raise UnsupportedError(
                f"{_CONFIG}: {shown}: expected null, because Penstock does not know this key, got {show(value)}",
                param=shown,
            )


def _key_without(reader: ConfigReader, module: str) -> str:
    """Return the key by which peft does not load the matrices of a module; empty if it does.

    A regular expression in place of a list of names is not looked at.
    """

    def names(key: str) -> bool | None:
        value = reader.values.get(key)
        if not isinstance(value, list) or not value:
            return None
        return any(f".{module}".endswith(f".{name}") for name in value)

    if names("target_modules") is False:
        return "target_modules"
    if names("exclude_modules"):
        return "exclude_modules"
    targets, layers = reader.values.get("target_modules"), reader.values.get("layers_to_transform")
    if layers in (None, []) or not isinstance(targets, list) or module in targets:
        return ""
    layer = _layer_of(reader, module)
    return "" if layer in (layers if isinstance(layers, list) else [layers]) else "layers_to_transform"


def _layer_of(reader: ConfigReader, module: str) -> int | None:
    """Return the number of the layer that a module is in: the first one in its name, behind ``layers_pattern``."""
    pattern = reader.values.get("layers_pattern")
    patterns = [pattern] if isinstance(pattern, str) and pattern else pattern or []
    parts = module.split(".")
    for before, part in list(pairwise(parts[:-1]))[0 if patterns else 1 :]:
        if part.isascii() and part.isdigit() and (not patterns or before in patterns):
            return int(part)
    return None


def _delta(reader: ConfigReader, module: str, pair: dict[str, NDArray[np.float32]]) -> _Delta:
    if set(pair) != {"lora_A", "lora_B"}:
        missing = "lora_B" if "lora_A" in pair else "lora_A"
        raise InvalidFileError(f"{_WEIGHTS}: {show(module)}: expected {missing}, got none", param=module)
    a, b = pair["lora_A"], pair["lora_B"]
    if a.shape[0] != b.shape[1]:
        raise InvalidFileError(
            f"{_WEIGHTS}: {show(module)}: lora_A has rank {a.shape[0]}, lora_B {b.shape[1]}", param=module
        )
    rank = _value_of(reader, "rank_pattern", module, reader.int("r"))
    if rank != a.shape[0]:
        raise InvalidFileError(
            f"{_CONFIG}: r: expected {a.shape[0]}, the rank of {show(module)}, got {rank:g}", param="r"
        )
    alpha = _value_of(reader, "alpha_pattern", module, reader.float("lora_alpha"))
    return _Delta(a, b, alpha / (math.sqrt(rank) if reader.bool("use_rslora", False) else rank))


def _value_of(reader: ConfigReader, key: str, module: str, default: float) -> float:
    """Return the value of a module: that of the first pattern that is the end of its name, or else the default."""
    section = reader.object(key)
    for pattern, value in (section.values if section is not None else {}).items():
        plain = pattern.removeprefix("^").removesuffix("$")
        if not plain.replace(".", "").replace("_", "").isalnum() or not is_number(value, 0, 1e9):
            raise UnsupportedError(
                f"{_CONFIG}: {key}: expected names of modules and numbers, got {show(pattern)}", param=key
            )
        if module == plain or module.endswith(f".{plain}"):
            return float(_plain(value))
    return default


def _plain(value: Any) -> float:
    return float(value)
