"""The keyword arguments of LLM: its own, and what callers of vLLM and transformers write."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.checkpoint.quantized.section import QUANTIZATION_FILES, packed_tensor, stored_methods
from penstock.checkpoint.side_files import model_folder, read_side_files
from penstock.checkpoint.stored.shards import open_shards
from penstock.engine.options import EngineFields, EngineOptions
from penstock.errors import FileAccessError, InvalidArgumentError, UnsupportedError
from penstock.file_kinds import is_gguf
from penstock.quant.scheme import SCHEMES
from penstock.runtime.program import ProgramLimits
from penstock.validation import nearest

if TYPE_CHECKING:
    from penstock.runtime.ranks.stage_server import StageServer

__all__ = ["LLMFields", "LLMOptions", "check_quantization", "local_path", "network_name", "read_llm_options"]


class LLMFields(EngineFields, total=False):
    """The keyword arguments of LLM that its signature does not name."""

    verify: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    context_parallel_size: int
    stage_server: StageServer | None
    context_len: int
    max_requests: int
    kv_cache: str
    weights: str
    quantization: str | None


@dataclass(frozen=True)
class LLMOptions:
    """The keyword arguments of an LLM after they were checked."""

    engine: EngineOptions
    limits: ProgramLimits | None
    scheme: str | None
    verify: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    context_parallel_size: int
    stage_server: StageServer | None
    quantization: str | None = None


_NAMED: Final = ("scheme", "mode", "threads", "network", "limits", "use_cache", "progress")
_LIMITS: Final = {
    "context_len": "context_len", "max_requests": "max_requests", "kv_cache": "kv_layout", "weights": "weights",
}  # fmt: skip
"""Keywords and the fields of ProgramLimits that they set."""
_SYNONYMS: Final = {
    "max_model_len": "context_len",
    "max_num_seqs": "max_requests",
    "kv_cache_dtype": "kv_cache",
    "kv_layout": "kv_cache",
    "enable_prefix_caching": "prefix_cache",
}
_DTYPES: Final = {"float32": "f32", "float16": "f16", "half": "f16", "bfloat16": "bf16"}
_FIXED: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "trust_remote_code": ((False, None), "no code of a model folder runs; network='file.py:Class' names your own"),
    "enforce_eager": ((False, None), "mode='eager' runs the network in PyTorch"),
    "device": (("cpu", "auto", None), "this build runs on the CPU"),
    "device_map": (("cpu", "auto", None), "this build runs on the CPU"),
    "enable_chunked_prefill": ((True, None), "prompts are always computed in chunks; max_chunk=N sets their size"),
    "swap_space": ((0, None), "pages are not swapped; a request that loses its pages is computed again"),
    "cpu_offload_gb": ((0, None), "this build runs on the CPU"),
    "tokenizer": ((None,), "set llm.tokenizer of the open LLM"),
    "seed": ((None,), "SamplingParams(seed=N) is the seed of a request"),
    "gpu_memory_utilization": ((), "context_len=N and max_requests=N say what memory is planned for"),
    "max_num_batched_tokens": ((), "limits=ProgramLimits(max_tokens=N) sets the tokens of a step"),
    "max_tokens": ((), "SamplingParams(max_tokens=N) limits an answer, limits=ProgramLimits(max_tokens=N) a step"),
    "revision": ((None,), "`penstock pull ORG/NAME@REVISION` downloads it; then pass 'ORG/NAME@REVISION' as the model"),
}
"""Keywords of vLLM and transformers whose meaning is fixed here: the values that agree, and what to use instead."""


def read_llm_options(keywords: Mapping[str, Any], limits: ProgramLimits | None, scheme: str | None) -> LLMOptions:
    """Return the checked keywords of an LLM.

    Raises InvalidArgumentError for a keyword that is unknown or given twice, and UnsupportedError for a value of
    another engine's keyword that has no meaning here.  Both name the keyword to use instead.
    """
    engine: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    ranks: dict[str, Any] = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "context_parallel_size": 1,
        "stage_server": None,
    }
    own: dict[str, Any] = {"verify": "once", "quantization": None, **ranks}
    for keyword, value in keywords.items():
        name = _SYNONYMS.get(keyword, keyword)
        if name != keyword and name in keywords:
            raise InvalidArgumentError(
                f"{keyword} and {name} are the same option: give only one of them", param=keyword
            )
        if name in own:
            own[name] = value
        elif name in EngineFields.__annotations__:
            engine[name] = value
        elif name in _LIMITS:
            sizes[_LIMITS[name]] = value
        elif name in ("dtype", "torch_dtype"):
            scheme = _scheme_of(value, scheme)
        elif name in _FIXED:
            _check_fixed(name, value)
        else:
            raise _unknown(name)
    if sizes and limits is not None:
        name = next(keyword for keyword, field in _LIMITS.items() if field in sizes)
        raise InvalidArgumentError(f"{name}: set it in limits (ProgramLimits.{_LIMITS[name]})", param=name)
    if sizes:
        count = sizes.get("max_requests")
        if isinstance(count, int):  # a step has room for a token of each request
            sizes["max_tokens"] = max(ProgramLimits.max_tokens, count)
        try:
            limits = ProgramLimits(**sizes)
        except InvalidArgumentError as error:
            if error.param != "kv_layout":
                raise
            raise InvalidArgumentError(str(error).replace("kv_layout", "kv_cache", 1), param="kv_cache") from None
    return LLMOptions(EngineOptions(**engine), limits, scheme, **own)


def check_quantization(method: object, source: Path | str) -> None:
    """Check vLLM's ``quantization``: None, or the method that the files of a model are quantized with.

    Those files say it themselves, so the option changes nothing.  UnsupportedError for another method.
    """
    if method is None:
        return
    names = _stored_methods(Path(source))
    stored = names[0] if names else None
    if isinstance(method, str) and {method.lower(), method.lower().removesuffix("_marlin")} & set(names):
        return  # gptq_marlin and awq_marlin are vLLM's kernels of a method
    is_own = isinstance(method, str) and method in SCHEMES
    instead = f"scheme={method!r}" if is_own else "scheme='w8a8' or scheme='w4a8'"
    actual = f"whose weights are quantized with {stored!r}" if stored else "whose weights are not quantized"
    raise UnsupportedError(
        f"quantization: expected None{f' or {stored!r}' if stored else ''} for {source}, {actual}, got {method!r:.60}; "
        f"{instead} quantizes a checkpoint folder",
        param="quantization",
    )


def _stored_methods(source: Path) -> list[str]:
    """Return the names of the method that a folder, a bundle or a GGUF file is quantized with, as vLLM has them."""
    if is_gguf(source):
        return ["gguf"]
    if not source.exists():
        return []
    files = read_side_files(source, ["config.json", *QUANTIZATION_FILES])
    if source.is_dir() and len(files) > 1:  # files beside weights that are not quantized say nothing
        tensors = {name: info for file in open_shards(model_folder(source)) for name, info in file.tensors.items()}
        if packed_tensor(tensors) is None:
            files = {name: data for name, data in files.items() if name not in QUANTIZATION_FILES}
    return stored_methods(files)


def _scheme_of(dtype: object, scheme: str | None) -> str | None:
    """Return the scheme for vLLM's ``dtype``: a name such as "bfloat16", or a type of PyTorch."""
    name = str(dtype).removeprefix("torch.")
    if dtype is None or name == "auto":
        return scheme
    if name not in _DTYPES:
        raise InvalidArgumentError(
            f"dtype: expected auto, {', '.join(_DTYPES)}, got {name!r:.60}; scheme= has more types", param="dtype"
        )
    if scheme is not None:
        raise InvalidArgumentError("dtype and scheme both set the type of the weights: give only scheme", param="dtype")
    return _DTYPES[name]


def _check_fixed(name: str, value: object) -> None:
    allowed, instead = _FIXED[name]
    if not any(value == fixed and type(value) is type(fixed) for fixed in allowed):
        raise UnsupportedError(f"{name}={value!r:.60} is not supported: {instead}", param=name)


def _unknown(name: str) -> InvalidArgumentError:
    names = [*_NAMED, *LLMFields.__annotations__, *EngineFields.__annotations__]
    near = nearest(name, names)
    if not near and name in ProgramLimits.__dataclass_fields__:
        return InvalidArgumentError(f"LLM has no option {name!r}: use limits=ProgramLimits({name}=...)", param=name)
    hint = f"did you mean {near}?" if near else f"it has {', '.join(dict.fromkeys(names))}"
    return InvalidArgumentError(f"LLM has no option {name!r}: {hint}", param=name)


def network_name(network: str | type | None) -> str | None:
    """Return a network as "file.py:Class", because the process that captures it imports it from its file.

    A class must be a torch.nn.Module that is defined at the top of a file.  InvalidArgumentError otherwise.
    """
    if not isinstance(network, type):
        return network
    if not any(base.__module__.startswith("torch.") for base in network.__mro__):  # without importing PyTorch
        raise InvalidArgumentError(
            f"network: expected a subclass of torch.nn.Module, or 'file.py:Class', got {network!r:.80}",
            param="network",
        )
    module = sys.modules.get(network.__module__)
    path = getattr(module, "__file__", None)
    name = network.__qualname__
    if path is None or not isinstance(getattr(module, name, None), type):
        raise InvalidArgumentError(
            f"network: {name} is not at the top of a file. Save it as file.py and pass 'file.py:{name}'.",
            param="network",
        )
    return f"{Path(path).absolute()}:{name}"


def local_path(model: Path | str) -> Path | str:
    """Return the folder of a downloaded model for ORG/NAME or a short name; a path stays as it is.

    FileAccessError if the name is that of a model which is not on this machine.
    """
    if not isinstance(model, str) or not model or Path(model).exists():
        return model
    from penstock.hub.names import parse_model

    try:
        name = parse_model(model)
    except InvalidArgumentError as error:
        raise FileAccessError(str(error), param="model") from None
    if name is None:
        return model
    from penstock.hub.downloaded import find_downloaded

    path = find_downloaded(name)
    if path is None:
        raise FileAccessError(
            f"{model}: no such file or folder in {Path.cwd()}, and no downloaded model of that name. `penstock pull "
            f"{model}` downloads one."
        )
    return path
