"""Write a checkpoint folder as a GGUF file, as llama.cpp reads it: names, forms and keys are those of its converter."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.float_types import convert_floats, to_float32
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.gguf.architectures import TOP_NAMES, Architecture, architecture_of
from penstock.checkpoint.gguf.tokenizer_out import tokenizer_metadata
from penstock.checkpoint.gguf.writer import FILE_TYPES, GgufEntry, GgufWriter, quantize_q8_0
from penstock.config import RopeConfig, check_choice
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.models.mapped import open_mapped
from penstock.models.registry import find_network

__all__ = ["GGUF_TYPES", "write_gguf"]

GGUF_TYPES: Final = tuple(FILE_TYPES)
"""The element types that matrices can have; vectors and routers are float32."""
_FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "granite", "gemma", "gemma2", "gemma3_text")
_PARAMETER: Final = re.compile(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)")
_PIECE_VALUES: Final = 1 << 22
_CAPS: Final = {"attn_logit_softcapping": "score_cap", "final_logit_softcapping": "logit_cap"}


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the file: its entry, and the parameter that it has."""

    entry: GgufEntry
    parameter: str
    pair_heads: int = 0


def write_gguf(folder: Path, out: Path, kind: str, progress: Callable[[int, int], None]) -> int:
    """Write ``out`` from a checkpoint folder; return the number of tensors.

    ``kind``: one of GGUF_TYPES, the element type of matrices.  ``progress(done, total)`` counts bytes of what is read.
    Raises UnsupportedError, which names the field, for what the architecture of the file cannot say.
    """
    check_choice("dtype", kind, GGUF_TYPES)
    checkpoint = open_mapped(folder)
    model_type = checkpoint.config.str("model_type")
    found = architecture_of(model_type)
    if found is None or model_type not in _FAMILIES:
        raise UnsupportedError(
            f"model_type: expected one of {', '.join(_FAMILIES)} for a GGUF file, found {model_type}",
            param="model_type",
        )
    if checkpoint.scheme is not None or checkpoint.own_block_scheme() is not None:
        raise UnsupportedError(f"{checkpoint.folder}: expected float weights, found quantized ones", param="source")
    name, architecture = found
    own = find_network(model_type).Config.read(checkpoint.config)
    metadata = {"general.architecture": name, "general.file_type": FILE_TYPES[kind]}
    if kind == "q8_0":
        metadata["general.quantization_version"] = 2
    metadata |= {f"{name}.{key}": value for key, value in _keys(own, architecture, model_type).items()}
    metadata |= tokenizer_metadata(checkpoint.side_files(), own.vocab_size)
    tensors = _tensors(checkpoint, architecture, own, kind)
    factors = _llama3_factors(_decoder(own).rope)
    entries = [tensor.entry for tensor in tensors]
    if factors is not None:
        entries.append(GgufEntry("rope_freqs.weight", "f32", factors.shape))
    writer = GgufWriter(out, metadata, entries)
    total, done = sum(checkpoint.tensors[tensor.parameter].num_bytes for tensor in tensors), 0
    for tensor in tensors:
        for data in _data(checkpoint, tensor):
            writer.add(data)
        checkpoint.release(tensor.parameter)
        done += checkpoint.tensors[tensor.parameter].num_bytes
        progress(done, total)
    if factors is not None:
        writer.add(factors)
    writer.close()
    return len(entries)


def _decoder(config: Any) -> Any:
    """Return the sizes of the network; some families have them under ``decoder``."""
    return getattr(config, "decoder", config)


def _keys(config: Any, architecture: Architecture, model_type: str) -> dict[str, Any]:
    """Return the keys of the architecture, without its name."""
    sizes = _decoder(config)
    keys: dict[str, Any] = {
        "context_length": sizes.context_len,
        "embedding_length": sizes.hidden_size,
        "block_count": len(sizes.windows),
        "feed_forward_length": sizes.intermediate_size,
        "attention.head_count": sizes.num_heads,
        "attention.head_count_kv": sizes.num_kv_heads,
        "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim,
        "attention.layer_norm_rms_epsilon": sizes.norm_eps,
        "rope.dimension_count": sizes.rope.rotary_dim,
        "rope.freq_base": sizes.rope.theta,
        "vocab_size": sizes.vocab_size,
    }
    if sizes.rope.rotary_dim != sizes.head_dim:
        raise UnsupportedError("partial_rotary_factor: expected 1 for a GGUF file", param="partial_rotary_factor")
    keys |= _rope_keys(sizes.rope)
    keys |= {key: float(getattr(config, own)) for key, own in architecture.factors.items()}
    if model_type in ("gemma2", "gemma3_text"):
        keys |= _gemma_keys(config, model_type)
    elif any(sizes.windows):
        raise UnsupportedError(
            f"sliding_window: expected none for a GGUF file of {model_type}, found {max(sizes.windows)}",
            param="sliding_window",
        )
    return keys


def _rope_keys(rope: RopeConfig) -> dict[str, Any]:
    if rope.type in ("default", "llama3"):
        return {}
    if rope.type not in ("linear", "yarn"):
        raise UnsupportedError(f"rope_type: expected default, linear, llama3 or yarn, found {rope.type}")
    keys: dict[str, Any] = {"rope.scaling.type": rope.type, "rope.scaling.factor": float(rope.factor)}
    if rope.type == "yarn":
        usual = RopeConfig(rope.theta, factor=rope.factor, attention_factor=0.1 * math.log(rope.factor) + 1.0)
        for field in ("beta_fast", "beta_slow", "truncate", "attention_factor"):
            found, expected = getattr(rope, field), getattr(usual, field)
            if not math.isclose(found, expected, rel_tol=1e-6):
                raise UnsupportedError(
                    f"rope_parameters.{field}: expected {expected} for a GGUF file, found {found}",
                    param="rope_parameters",
                )
        keys["rope.scaling.original_context_length"] = rope.original_max_position_embeddings
    return keys


def _llama3_factors(rope: RopeConfig) -> NDArray[np.float32] | None:
    """Return what each frequency is divided by under Llama 3's scaling; None for others."""
    if rope.type != "llama3":
        return None
    low, high, context = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings
    factors = []
    for index in range(rope.rotary_dim // 2):
        turns = context * rope.theta ** -(2 * index / rope.rotary_dim) / (2 * math.pi)
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - share) / rope.factor + share))
    return np.array(factors, np.float32)


def _gemma_keys(config: Any, model_type: str) -> dict[str, Any]:
    """Return the window and the caps of Gemma 2 and 3; what GGUF has no key for must be that of published models."""
    sizes, period = config.decoder, 2 if model_type == "gemma2" else 6
    window = max(sizes.windows)
    usual = tuple(0 if (layer + 1) % period == 0 else window for layer in range(len(sizes.windows)))
    is_large = len(sizes.windows) == {"gemma2": 46}.get(model_type, 62)
    divisor = sizes.hidden_size / sizes.num_heads if is_large else sizes.head_dim
    local = config.local_rope or RopeConfig(10000.0)
    values = {  # as found, and as llama.cpp takes it
        "layer_types": (sizes.windows, usual),
        "query_pre_attn_scalar": (config.score_divisor, divisor),
        "use_bidirectional_attention": (not config.causal, False),
        "rope_local_base_freq": (local.theta, 10000.0),
        "attn_logit_softcapping": (config.score_cap, config.score_cap if model_type == "gemma2" else 0.0),
    }
    for key, (value, expected) in values.items():
        if value != expected:
            raise UnsupportedError(f"{key}: expected {expected} for a GGUF file, found {value}", param=key)
    caps = {key: float(getattr(config, own)) for key, own in _CAPS.items() if getattr(config, own)}
    return {"attention.sliding_window": window, **caps}


def _tensors(checkpoint: Checkpoint, architecture: Architecture, config: Any, kind: str) -> list[_Tensor]:
    """Return the tensors of the file, in the order of the checkpoint's."""
    parts = {name: part for part, name in architecture.layer_names.items()}
    top = {name: part for part, name in TOP_NAMES.items()}
    sizes, redundant, result = _decoder(config), checkpoint.redundant_names(), []
    for name, info in checkpoint.tensors.items():
        match = _PARAMETER.fullmatch(name)
        layer, module, end = match.groups() if match else (None, "", "")
        if name in redundant or (module == "lm_head" and sizes.tied):
            continue
        part = (top if layer is None else parts).get(module)
        if part is None:
            raise UnsupportedError(f"{info.file}: tensor {name}: GGUF has no name for it", param="source")
        is_matrix = len(info.shape) == 2
        own = kind if is_matrix and (kind != "q8_0" or info.shape[1] % 32 == 0) else "f16" if is_matrix else "f32"
        heads = {"attn_q": sizes.num_heads, "attn_k": sizes.num_kv_heads}
        pair_heads = heads.get(part, 0) if architecture.has_pairs and layer is not None else 0
        stored = f"{part}.{end}" if layer is None else f"blk.{layer}.{part}.{end}"
        result.append(_Tensor(GgufEntry(stored, own, info.shape), name, pair_heads))
    return result


def _data(checkpoint: Checkpoint, tensor: _Tensor) -> Iterator[NDArray[Any]]:
    """Yield the data of a tensor in runs of rows."""
    info, kind = checkpoint.tensors[tensor.parameter], tensor.entry.kind
    values = checkpoint.read(tensor.parameter)
    if tensor.pair_heads:
        half = len(values) // tensor.pair_heads // 2
        values = values.reshape(tensor.pair_heads, 2, half, -1).swapaxes(1, 2).reshape(values.shape)
    step = max(1, _PIECE_VALUES // max(1, math.prod(info.shape[1:])))
    for start in range(0, info.shape[0], step):
        rows = np.ascontiguousarray(values[start : start + step])
        try:
            if kind == "q8_0":
                yield quantize_q8_0(to_float32(rows, info.dtype))
            else:
                yield convert_floats(rows, info.dtype, kind)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{info.file}: tensor {tensor.parameter}: {error}", param="dtype") from None
