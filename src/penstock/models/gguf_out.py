"""Write a checkpoint folder as a GGUF file, as llama.cpp reads it: names, forms and keys are those of its converter."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.float_types import convert_floats, to_float32
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.gguf.architectures.architecture import TOP_NAMES, Architecture
from penstock.checkpoint.gguf.architectures.table import architecture_of
from penstock.checkpoint.gguf.exact_blocks import exact_blocks, exact_kind
from penstock.checkpoint.gguf.imatrix import read_imatrix
from penstock.checkpoint.gguf.k_blocks import BLOCK_LEN, quantize_q4_k, quantize_q6_k
from penstock.checkpoint.gguf.tokenizer_out import tokenizer_metadata
from penstock.checkpoint.gguf.writer import FILE_TYPES, GgufEntry, GgufWriter, quantize_q8_0
from penstock.config import RopeConfig, check_choice
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.models.mapped import open_mapped
from penstock.models.registry import find_network
from penstock.quant.methods.weighted import normalized
from penstock.quant.scheme import GROUP_LEN, find_scheme

__all__ = ["GGUF_TYPES", "write_gguf"]

GGUF_TYPES: Final = tuple(FILE_TYPES)
"""The element types that matrices can have; vectors and routers are float32."""
_K_TYPES: Final = ("q4_k", "q6_k")
_WEIGHTED: Final = {"q4_k": quantize_q4_k, "q6_k": quantize_q6_k}
_QUANTIZERS: Final = {"q8_0": quantize_q8_0, **_WEIGHTED}
_FAMILIES: Final = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "smollm3", "granite", "gemma", "gemma2", "gemma3_text",
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe",
)  # fmt: skip
_FUSED: Final = {
    "phi3": {"attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
             "ffn_up": ("mlp.gate_proj", "mlp.up_proj")},
}  # fmt: skip
"""Tensors of a layer that have the rows of several parameters one above another, by model_type."""
_FLOAT32_PARTS: Final = ("ffn_gate_inp", "ffn_gate_inp_shexp")
_NO_ROPE_INTERVAL: Final = 4
"""Every such layer of SmolLM 3 has no rotary positions; GGUF has no key for it."""
_EXPERT: Final = re.compile(r"(.+\.experts\.)\d+(\..+)")
_PARAMETER: Final = re.compile(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)")
_PIECE_VALUES: Final = 1 << 22
_CAPS: Final = {"attn_logit_softcapping": "score_cap", "final_logit_softcapping": "logit_cap"}


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the file: its entry, and the parameters that it has one after another."""

    entry: GgufEntry
    parameters: tuple[str, ...]
    pair_heads: int = 0


def write_gguf(
    folder: Path, out: Path, kind: str, progress: Callable[[int, int], None], imatrix: Path | None = None
) -> tuple[int, str]:
    """Write ``out`` from a checkpoint folder; return the number of tensors, and which have another type than the rest.

    ``kind``: one of GGUF_TYPES, the element type of matrices; those of a folder of ``penstock quantize --exportable``
    keep their integers.  ``progress(done, total)`` counts bytes of what is read.
    ``imatrix``: an importance matrix, whose mean squares weight the errors of columns in Q4_K and Q6_K.  Raises
    UnsupportedError, which names the field, for what the architecture of the file cannot say.
    """
    check_choice("dtype", kind, GGUF_TYPES)
    checkpoint = open_mapped(folder)
    model_type = checkpoint.config.str("model_type")
    entry = architecture_of(model_type)
    if entry is None or model_type not in _FAMILIES:
        raise UnsupportedError(
            f"model_type: expected one of {', '.join(_FAMILIES)} for a GGUF file, got {model_type}",
            param="model_type",
        )
    file_kind = _file_kind(checkpoint, kind)
    name, architecture = entry
    own = find_network(model_type).Config.read(checkpoint.config)
    metadata = {"general.architecture": name, "general.file_type": FILE_TYPES[file_kind]}
    if file_kind in _QUANTIZERS:
        metadata["general.quantization_version"] = 2
    metadata |= {f"{name}.{key}": value for key, value in _keys(own, architecture, model_type).items()}
    metadata |= tokenizer_metadata(checkpoint.side_files(), own.vocab_size)
    tensors = _tensors(checkpoint, architecture, own, kind, _FUSED.get(model_type, {}))
    weights = {} if imatrix is None else _column_weights(imatrix, checkpoint, model_type)
    factors = _llama3_factors(_decoder(own).rope)
    entries = [tensor.entry for tensor in tensors]
    if factors is not None:
        entries.append(GgufEntry("rope_freqs.weight", "f32", factors.shape))
    writer = GgufWriter(out, metadata, entries)
    parameters = [(tensor, parameter) for tensor in tensors for parameter in tensor.parameters]
    total, done = sum(checkpoint.tensors[parameter].num_bytes for _, parameter in parameters), 0
    for tensor, parameter in parameters:
        for data in _data(checkpoint, tensor, parameter, weights.get(parameter)):
            writer.add(data)
        checkpoint.release(parameter)
        done += checkpoint.tensors[parameter].num_bytes
        progress(done, total)
    if factors is not None:
        writer.add(factors)
    writer.close()
    return len(entries), _kind_note(checkpoint, tensors, file_kind)


def _kind_note(checkpoint: Checkpoint, tensors: Sequence[_Tensor], file_kind: str) -> str:
    """Return which tensors with integers lack the type of the file because of their columns; "" if none does."""
    notes = []
    for kind, block_len in (("q8_0", BLOCK_LEN), ("f32", GROUP_LEN)):
        own = [tensor for tensor in tensors if checkpoint.is_quantized(tensor.parameters[0]) and kind != file_kind]
        entries = [tensor.entry for tensor in own if tensor.entry.kind == kind]
        names = [entry.name for entry in entries if entry.shape[-1] % block_len]
        if names:
            others = f" and {len(names) - 1} more tensors are" if len(names) > 1 else " is"
            notes.append(
                f"{names[0]}{others} {kind.upper()}, with the same values, because their columns are no multiple of "
                f"{block_len}"
            )
    return "; ".join(notes)


def _file_kind(checkpoint: Checkpoint, kind: str) -> str:
    """Return the element type of a file as a whole; UnsupportedError for weights that are quantized in other blocks."""
    if checkpoint.own_block_scheme() is not None and checkpoint.scheme is None:
        raise UnsupportedError(f"{checkpoint.folder}: expected float weights, got quantized ones", param="source")
    if checkpoint.scheme is None:
        return kind
    scheme = find_scheme(checkpoint.scheme)
    if scheme.hadamard:
        raise UnsupportedError(
            f"source: expected a scheme that a GGUF file can hold, got {scheme.name}, whose inputs are rotated",
            param="source",
        )
    return "q4_k" if scheme.weight_bits == 4 else "q8_0"


def _column_weights(file: Path, checkpoint: Checkpoint, model_type: str) -> dict[str, NDArray[np.float32]]:
    """Return the weight of each column's error, by the names of matrices."""
    result = {}
    for name, inputs in read_imatrix(file, model_type).weights.items():
        info = checkpoint.tensors.get(name)
        if info is None:
            continue
        if info.shape[-1:] != inputs.squares.shape:
            raise InvalidFileError(
                f"{file}: {name}: expected {info.shape[-1]} columns, got {len(inputs.squares)}", param="imatrix"
            )
        result[name] = normalized(inputs.mean_squares)
    return result


def _decoder(config: Any) -> Any:
    """Return the sizes of the network; some families have them under ``decoder``."""
    own = getattr(config, "granite", config)
    return getattr(own, "decoder", own)


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
    factors = getattr(config, "granite", config)
    keys |= {key: float(getattr(factors, own)) for key, own in architecture.factors.items()}
    if architecture.num_experts:
        keys |= _expert_keys(getattr(config, "mixture", config), architecture)
    if model_type == "smollm3":
        _check_rope_layers(sizes.rope_layers)
    if model_type in ("gemma2", "gemma3_text"):
        keys |= _gemma_keys(config, model_type)
    elif model_type == "phi3":
        keys["attention.sliding_window"] = sizes.windows[0]
    elif any(sizes.windows):
        raise UnsupportedError(
            f"sliding_window: expected none for a GGUF file of {model_type}, got {max(sizes.windows)}",
            param="sliding_window",
        )
    return keys


def _expert_keys(mixture: Any, architecture: Architecture) -> dict[str, Any]:
    """Return the keys of experts; what GGUF has no key for must be as llama.cpp takes it."""
    if not all(mixture.sparse):
        dense = mixture.sparse.index(False)
        raise UnsupportedError(
            f"mlp_only_layers: expected experts in every layer for a GGUF file, got none in layer {dense}",
            param="mlp_only_layers",
        )
    expected = architecture.constants.get("norm_topk_prob", mixture.routing.renormalise)
    if mixture.routing.renormalise != expected:
        raise UnsupportedError(
            f"norm_topk_prob: expected {str(expected).lower()} for a GGUF file, got "
            f"{str(mixture.routing.renormalise).lower()}",
            param="norm_topk_prob",
        )
    if clip := getattr(mixture, "clip", 0.0):
        raise UnsupportedError(f"clip_qkv: expected null for a GGUF file, got {clip:g}", param="clip_qkv")
    keys = {"expert_count": mixture.num_experts, "expert_used_count": mixture.routing.k}
    if architecture.expert_size != "intermediate_size":
        keys["expert_feed_forward_length"] = mixture.expert_size
    if mixture.shared_size:
        keys["expert_shared_feed_forward_length"] = mixture.shared_size
    return keys


def _check_rope_layers(rope_layers: tuple[bool, ...]) -> None:
    """Refuse another choice of the layers without rotary positions than that of llama.cpp."""
    usual = tuple((layer + 1) % _NO_ROPE_INTERVAL != 0 for layer in range(len(rope_layers)))
    if rope_layers != usual:
        raise UnsupportedError(
            f"no_rope_layers: expected 0 in every layer of number {_NO_ROPE_INTERVAL} for a GGUF file, got others",
            param="no_rope_layers",
        )


def _rope_keys(rope: RopeConfig) -> dict[str, Any]:
    if rope.type in ("default", "llama3"):
        return {}
    if rope.type not in ("linear", "yarn"):
        raise UnsupportedError(
            f"rope_type: expected default, linear, llama3 or yarn, got {rope.type}", param="rope_type"
        )
    keys: dict[str, Any] = {"rope.scaling.type": rope.type, "rope.scaling.factor": float(rope.factor)}
    if rope.type == "yarn":
        usual = RopeConfig(rope.theta, factor=rope.factor, attention_factor=0.1 * math.log(rope.factor) + 1.0)
        for field in ("beta_fast", "beta_slow", "truncate", "attention_factor"):
            actual, expected = getattr(rope, field), getattr(usual, field)
            if not math.isclose(actual, expected, rel_tol=1e-6):
                raise UnsupportedError(
                    f"rope_parameters.{field}: expected {expected} for a GGUF file, got {actual}",
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
            raise UnsupportedError(f"{key}: expected {expected} for a GGUF file, got {value}", param=key)
    caps = {key: float(getattr(config, own)) for key, own in _CAPS.items() if getattr(config, own)}
    return {"attention.sliding_window": window, **caps}


def _tensors(
    checkpoint: Checkpoint, architecture: Architecture, config: Any, kind: str, fused: Mapping[str, tuple[str, ...]]
) -> list[_Tensor]:
    """Return the tensors of the file, in the order of the checkpoint's."""
    sizes, redundant = _decoder(config), checkpoint.redundant_names()
    redundant = redundant.union(*(checkpoint.companions(name) for name in checkpoint.tensors))
    places = {name: part for part, name in architecture.layer_names.items()}
    places |= {name: part for part, names in fused.items() for name in names}
    top, order = {name: part for part, name in TOP_NAMES.items()}, {}
    parameters: dict[tuple[str | None, str, str], list[str]] = {}
    for name, info in checkpoint.tensors.items():
        match = _PARAMETER.fullmatch(name)
        layer, module, end = match.groups() if match else (None, "", "")
        if name in redundant or (module == "lm_head" and sizes.tied):
            continue
        part = (top if layer is None else places).get(_EXPERT.sub(r"\1{}\2", module))
        if part is None:
            raise UnsupportedError(f"{info.file}: tensor {name}: GGUF has no name for it", param="source")
        order[name] = fused[part].index(module) if part in fused else _expert_number(module)
        parameters.setdefault((layer, part, end), []).append(name)
    result = []
    for (layer, part, end), names in parameters.items():
        names.sort(key=order.__getitem__)
        shape = _joined_shape([checkpoint.logical_shape(name) for name in names], part in fused)
        if part == "ffn_gate_inp_shexp":  # a matrix of one row is a vector
            shape = shape[-1:]
        is_matrix = len(shape) > 1 and part not in _FLOAT32_PARTS and end == "weight"
        is_head = part == "output" or (part == "token_embd" and sizes.tied)
        own = _kind_of(kind, shape[-1], is_head) if is_matrix else "f32"
        kinds = {exact_kind(checkpoint, name) if checkpoint.is_quantized(name) else own for name in names}
        own = kinds.pop() if len(kinds) == 1 else "f32"
        heads = {"attn_q": sizes.num_heads, "attn_k": sizes.num_kv_heads}
        pair_heads = heads.get(part, 0) if architecture.has_pairs and layer is not None else 0
        stored = f"{part}.{end}" if layer is None else f"blk.{layer}.{part}.{end}"
        result.append(_Tensor(GgufEntry(stored, own, shape), tuple(names), pair_heads))
    return result


def _kind_of(kind: str, num_columns: int, is_head: bool) -> str:
    """Return the element type of a matrix in a file of ``kind``, like llama.cpp with more bits for the output head.

    Rows without whole blocks have the next type whose blocks fit.
    """
    if kind == "q4_k" and is_head:
        kind = "q6_k"
    if kind in _K_TYPES and num_columns % BLOCK_LEN:
        kind = "q8_0"
    return "f16" if kind == "q8_0" and num_columns % 32 else kind


def _expert_number(module: str) -> int:
    """Return the number of the expert that a module is a part of; 0 for other modules."""
    match = re.search(r"\.experts\.(\d+)\.", module)
    return 0 if match is None else int(match[1])


def _joined_shape(shapes: list[tuple[int, ...]], is_fused: bool) -> tuple[int, ...]:
    """Return the shape of a tensor that has the rows of several parameters, or their matrices."""
    if is_fused:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])
    return shapes[0] if len(shapes) == 1 else (len(shapes), *shapes[0])


def _data(
    checkpoint: Checkpoint, tensor: _Tensor, parameter: str, weights: NDArray[np.float32] | None
) -> Iterator[NDArray[Any]]:
    """Yield the data of a parameter in runs of rows."""
    info, kind = checkpoint.tensors[parameter], tensor.entry.kind
    dtype = info.dtype
    if checkpoint.is_quantized(parameter):
        values, dtype = exact_blocks(checkpoint, parameter, kind), "f32"
    else:
        values = checkpoint.read(parameter)
    if tensor.pair_heads:
        half = len(values) // tensor.pair_heads // 2
        values = values.reshape(tensor.pair_heads, 2, half, -1).swapaxes(1, 2).reshape(values.shape)
    step = max(1, _PIECE_VALUES // max(1, math.prod(info.shape[1:])))
    for start in range(0, info.shape[0], step):
        rows = np.ascontiguousarray(values[start : start + step])
        try:
            if rows.dtype == np.uint8:  # blocks
                yield rows
            elif kind in _WEIGHTED:
                yield _WEIGHTED[kind](to_float32(rows.reshape(-1, rows.shape[-1]), dtype), weights)
            elif kind in _QUANTIZERS:
                yield _QUANTIZERS[kind](to_float32(rows.reshape(-1, rows.shape[-1]), dtype))
            else:
                yield convert_floats(rows, dtype, kind)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{info.file}: tensor {parameter}: {error}", param="dtype") from None
