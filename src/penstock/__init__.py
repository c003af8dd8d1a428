"""Penstock: inference of language models and of other networks.

Names are imported when they are first used.  Importing the package is cheap and never loads PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.auto import AutoConfig, AutoModel, AutoTokenizer, GenerateOutput, GenerationConfig
    from penstock.calibration.ptq import PTQ
    from penstock.client.async_client import AsyncClient
    from penstock.client.client import Client
    from penstock.core.library import load_ops
    from penstock.engine.logprobs import TokenLogprobs
    from penstock.engine.options import EngineOptions, RequestOptions
    from penstock.engine.params import SamplingParams
    from penstock.errors import (
        DeadlineError,
        FileAccessError,
        InternalError,
        InvalidArgumentError,
        InvalidFileError,
        NotFoundError,
        OutOfMemoryError,
        PenstockError,
        QueueFullError,
        ServiceError,
        UnavailableError,
        UnsupportedError,
    )
    from penstock.llm.async_llm import AsyncLLM, AsyncStream
    from penstock.llm.classify import Classification, Ranked
    from penstock.llm.conversation import Conversation, Turn
    from penstock.llm.llm import LLM
    from penstock.llm.result import Choice, Delta, Embedding, Result, Score
    from penstock.llm.stream import Stream
    from penstock.llm.streamers import Streamer, TextStreamer
    from penstock.models.loader import load_network
    from penstock.models.registry import register_network
    from penstock.networks.network import CapturedNetwork, CompiledModule, capture, compile, read_network
    from penstock.networks.predictor import Predictor, open_predictor
    from penstock.offline.export import export
    from penstock.offline.infer_config import InferConfig
    from penstock.offline.pipeline import pipeline
    from penstock.offline.tasks import InferTask
    from penstock.ops.custom import custom_op
    from penstock.quant.ptq_config import BackendTarget, PTQConfig, PTQMode
    from penstock.quant.round_to_nearest import RoundToNearest, RoundToNearestConfig
    from penstock.runtime.program import ProgramLimits

__all__ = [  # noqa: RUF022 - in the order of sorted()
    "AsyncClient",
    "AsyncLLM",
    "AsyncStream",
    "AutoConfig",
    "AutoModel",
    "AutoTokenizer",
    "BackendTarget",
    "CapturedNetwork",
    "Choice",
    "Classification",
    "Client",
    "CompiledModule",
    "Conversation",
    "DeadlineError",
    "Delta",
    "Embedding",
    "EngineOptions",
    "FileAccessError",
    "GenerateOutput",
    "GenerationConfig",
    "InferConfig",
    "InferTask",
    "InternalError",
    "InvalidArgumentError",
    "InvalidFileError",
    "LLM",
    "NotFoundError",
    "OutOfMemoryError",
    "PTQ",
    "PTQConfig",
    "PTQMode",
    "PenstockError",
    "Predictor",
    "ProgramLimits",
    "QueueFullError",
    "Ranked",
    "RequestOptions",
    "Result",
    "RoundToNearest",
    "RoundToNearestConfig",
    "SamplingParams",
    "Score",
    "ServiceError",
    "Stream",
    "Streamer",
    "TextStreamer",
    "TokenLogprobs",
    "Turn",
    "UnavailableError",
    "UnsupportedError",
    "__version__",
    "capture",
    "compile",
    "custom_op",
    "export",
    "load_network",
    "load_ops",
    "open_predictor",
    "pipeline",
    "read_network",
    "register_network",
]

_HOMES = {
    "penstock.auto": ("AutoConfig", "AutoModel", "AutoTokenizer", "GenerateOutput", "GenerationConfig"),
    "penstock.llm.async_llm": ("AsyncLLM", "AsyncStream"),
    "penstock.llm.conversation": ("Conversation", "Turn"),
    "penstock.llm.llm": ("LLM",),
    "penstock.engine.options": ("EngineOptions", "RequestOptions"),
    "penstock.engine.params": ("SamplingParams",),
    "penstock.engine.logprobs": ("TokenLogprobs",),
    "penstock.llm.classify": ("Classification", "Ranked"),
    "penstock.llm.result": ("Choice", "Delta", "Embedding", "Result", "Score"),
    "penstock.llm.stream": ("Stream",),
    "penstock.llm.streamers": ("Streamer", "TextStreamer"),
    "penstock.errors": (
        "DeadlineError",
        "FileAccessError",
        "InternalError",
        "InvalidArgumentError",
        "InvalidFileError",
        "NotFoundError",
        "OutOfMemoryError",
        "PenstockError",
        "QueueFullError",
        "ServiceError",
        "UnavailableError",
        "UnsupportedError",
    ),
    "penstock.core.library": ("load_ops",),
    "penstock.models.loader": ("load_network",),
    "penstock.models.registry": ("register_network",),
    "penstock.networks.network": ("CapturedNetwork", "CompiledModule", "capture", "compile", "read_network"),
    "penstock.networks.predictor": ("Predictor", "open_predictor"),
    "penstock.offline.export": ("export",),
    "penstock.offline.infer_config": ("InferConfig",),
    "penstock.offline.pipeline": ("pipeline",),
    "penstock.ops.custom": ("custom_op",),
    "penstock.offline.tasks": ("InferTask",),
    "penstock.calibration.ptq": ("PTQ",),
    "penstock.quant.ptq_config": ("BackendTarget", "PTQConfig", "PTQMode"),
    "penstock.quant.round_to_nearest": ("RoundToNearest", "RoundToNearestConfig"),
    "penstock.runtime.program": ("ProgramLimits",),
    "penstock.client.async_client": ("AsyncClient",),
    "penstock.client.client": ("Client",),
}


_TRAINING = (
    "your own trainer on PyTorch, because training is not part of Penstock, and then penstock.export(network, OUT, "
    "config=FOLDER)"
)
_MODULES = ("client", "lite", "models", "nn", "ops", "servable")
_INSTEAD = {
    "AsyncEngineArgs": "AsyncLLM",
    "AsyncLLMEngine": "AsyncLLM",
    "AutoModelForCausalLM": "AutoModel",
    "AutoProcessor": "AutoTokenizer",
    "Context": "lite.Context",
    "LLMEngine": "LLM",
    "LlamaTokenizer": "AutoTokenizer",
    "Model": "lite.Model",
    "ModelType": "lite.ModelType",
    "OpenAI": "Client",
    "Tensor": "lite.Tensor",
    "TextIteratorStreamer": "LLM.stream",
    "Trainer": _TRAINING,
    "TrainingArguments": _TRAINING,
    "serve": "the command `penstock serve`",
}
"""Names of other libraries, and the names that replace them here."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        from importlib import import_module

        return import_module(f"penstock.{name}")
    for home, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            try:
                value = getattr(import_module(home), name)
            except ModuleNotFoundError as error:
                from penstock.extras import without_torch

                raise without_torch(f"penstock.{name}", error) from None
            globals()[name] = value
            return value
    from penstock.validation import missing_attribute

    raise missing_attribute("module 'penstock'", name, __all__, _INSTEAD)


def __dir__() -> list[str]:
    return list(__all__)
