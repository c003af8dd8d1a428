"""Split and fused linears: q, k and v in one tensor, gate and up in one, as Phi-3 stores what others store apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.checkpoint.tensor_file import TensorInfo
from penstock.config import ConfigReader, show
from penstock.errors import InvalidFileError, UnsupportedError

__all__ = ["FUSED_TYPE", "LAYOUTS", "RowRange", "Target", "fused_config", "keep", "rearrange"]

LAYOUTS: Final = ("split", "fused")
_GROUPS: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
FUSED_TYPE: Final = "phi3"
_SPLIT_TYPES: Final = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
_FUSED_ARCHITECTURE: Final = "Phi3ForCausalLM"
_DEFAULTS: Final[dict[str, Any]] = {"rms_norm_eps": {"phi3": 1e-5, "llama": 1e-6, "mistral": 1e-6}}


@dataclass(frozen=True)
class RowRange:
    """Rows ``start`` to ``stop`` of a stored tensor."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Target:
    """A tensor to write: the rows of its pieces, one after another."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[RowRange, ...]


def keep(tensors: Mapping[str, TensorInfo]) -> dict[str, Target]:
    """Return every tensor as it is."""
    return {name: _whole(name, info) for name, info in tensors.items()}


def _whole(name: str, info: TensorInfo) -> Target:
    return Target(info.dtype, info.shape, (RowRange(name, 0, info.shape[0] if info.shape else 1),))


def rearrange(layout: str, config: ConfigReader, tensors: Mapping[str, TensorInfo]) -> dict[str, Target]:
    """Return the tensors in a layout of LAYOUTS; those that have it already stay as they are.

    Raises InvalidFileError, which names a tensor whose rows are not those of config.json's heads.
    """
    targets: dict[str, Target] = {}
    for name, info in tensors.items():
        module, _, kind = name.rpartition(".")
        parent, _, layer = module.rpartition(".")
        if layout == "split" and layer in _GROUPS:
            start = 0
            for own, size in zip(_GROUPS[layer], _sizes(layer, config, name, info), strict=True):
                piece = RowRange(name, start, start + size)
                targets[f"{parent}.{own}.{kind}"] = Target(info.dtype, (size, *info.shape[1:]), (piece,))
                start += size
        elif layout == "fused" and (group := _group_of(layer)) is not None:
            names = [f"{parent}.{own}.{kind}" for own in _GROUPS[group]]
            infos = [tensors.get(own) for own in names]
            sources = [own for own in infos if own is not None]
            if len(sources) != len(names) or len({(own.dtype, own.shape[1:]) for own in sources}) != 1:
                raise InvalidFileError(
                    f"tensor {show(name)}: expected {', '.join(names)} of one type and width", param=name
                )
            pieces = tuple(RowRange(own, 0, source.shape[0]) for own, source in zip(names, sources, strict=True))
            rows = sum(source.shape[0] for source in sources)
            targets[f"{parent}.{group}.{kind}"] = Target(info.dtype, (rows, *info.shape[1:]), pieces)
        else:
            targets[name] = _whole(name, info)
    return targets


def _group_of(layer: str) -> str | None:
    return next((group for group, layers in _GROUPS.items() if layer in layers), None)


def _sizes(layer: str, config: ConfigReader, name: str, info: TensorInfo) -> list[int]:
    """Return the rows of each part of a fused tensor."""
    parts = [1, 1]
    if layer == "qkv_proj":
        num_heads = config.int("num_attention_heads")
        num_kv_heads = config.int("num_key_value_heads", num_heads)
        parts = [num_heads, num_kv_heads, num_kv_heads]
    if not info.shape or info.shape[0] % sum(parts):
        raise InvalidFileError(
            f"tensor {show(name)}: expected a multiple of {sum(parts)} rows, got {list(info.shape)}", param=name
        )
    return [info.shape[0] // sum(parts) * part for part in parts]


def fused_config(layout: str, config: ConfigReader) -> dict[str, Any]:
    """Return the values of config.json for a layout: of the model_type that stores its weights so.

    The networks are equal.  Raises UnsupportedError for one that only one of the types can have.
    """
    values, model_type = dict(config.values), config.str("model_type")
    sources = (FUSED_TYPE,) if layout == "split" else tuple(_SPLIT_TYPES)
    if model_type not in sources:
        expected = " or ".join(sources)
        raise UnsupportedError(f"layout: expected model_type {expected} for {layout}, got {model_type}", param="layout")
    has_window = config.has("sliding_window")
    target = FUSED_TYPE if layout == "fused" else "mistral" if has_window else "llama"
    _check_equal(config)
    for key, defaults in _DEFAULTS.items():
        values.setdefault(key, defaults[model_type])
    values["model_type"] = target
    values["architectures"] = [_SPLIT_TYPES.get(target, _FUSED_ARCHITECTURE)]
    values.pop("auto_map", None)
    if not has_window:
        values["sliding_window"] = None
    config.int("max_position_embeddings")
    return values


def _check_equal(config: ConfigReader) -> None:
    """Raise UnsupportedError for a key with which the two types compute differently."""
    for key in ("attention_bias", "mlp_bias"):
        if config.bool(key, False):
            raise UnsupportedError(f"config.json: {key}: expected false for another layout, got true", param=key)
    heads, hidden = config.int("num_attention_heads"), config.int("hidden_size")
    if config.int("head_dim", hidden // heads) * heads != hidden:
        raise UnsupportedError(
            f"config.json: head_dim: expected {hidden // heads} for another layout", param="head_dim"
        )
    for section in (config.object("rope_scaling"), config.object("rope_parameters")):
        kind = "default" if section is None else section.str("rope_type", section.str("type", "default"))
        if kind != "default":
            raise UnsupportedError(
                f"config.json: rope_type: expected default for another layout, got {show(kind)}", param="rope_type"
            )
        if section is not None and section.float("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedError(
                "config.json: partial_rotary_factor: expected 1 for another layout", param="partial_rotary_factor"
            )
    if config.float("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError(
            "config.json: partial_rotary_factor: expected 1 for another layout", param="partial_rotary_factor"
        )
