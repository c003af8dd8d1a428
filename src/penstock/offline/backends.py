"""A source opened by one of the backends: what continues prompts of token ids."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.checkpoint.generation import GenerationConfig
from penstock.core import native
from penstock.core.memory import can_map_segments
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.replace_tail import map_weights, with_tail
from penstock.lite.device import Context
from penstock.lite.model import Model
from penstock.lite.open_model import ModelType
from penstock.lite.settings import read_values
from penstock.llm.llm import LLM
from penstock.llm.result import Delta, Result
from penstock.offline.infer_config import InferConfig
from penstock.offline.lite_generator import LiteGenerator
from penstock.runtime.program import ProgramLimits
from penstock.runtime.verify import check_verify, open_verified
from penstock.text.tokenizer import Tokenizer

__all__ = ["BACKENDS", "Answers", "Generator", "RunOptions", "backend_named", "default_backend", "open_accelerated",
           "open_generator"]  # fmt: skip

BACKENDS: Final = ("graph", "lite", "eager")
_OTHER_NAMES: Final = {"ms": "graph", "mslite": "lite"}
"""Those of MindFormers."""
_BATCH: Final = 8
"""Prompts that the backend lite continues side by side unless the configuration file says."""
_PIPELINES_OWN: Final = {"seq_len": "tokens come as they are", "logits": "answers need the last row alone"}


class Answers(Protocol):
    """An answer as it grows."""

    def __iter__(self) -> Iterator[Delta]: ...

    def __next__(self) -> Delta: ...

    def abort(self) -> None:
        """End it here."""

    def result(self) -> Result:
        """The whole answer, once it has ended."""


class Generator(Protocol):
    """What continues prompts; ``penstock.LLM`` and LiteGenerator are ones."""

    tokenizer: Tokenizer
    generation: GenerationConfig

    def generate(self, prompts: Any, params: SamplingParams) -> Any:
        """A list of Results for a list of lists of token ids."""

    def stream(self, prompt: Any, params: SamplingParams) -> Answers:
        """The answer to one list of token ids."""

    def close(self) -> None:
        """Give the memory back."""


@dataclass(frozen=True)
class RunOptions:
    """How a source is run: ``scheme`` and ``network`` for a checkpoint folder, ``threads`` (0: as many as allowed)."""

    backend: str = "graph"
    scheme: str | None = None
    threads: int = 0
    network: str | None = None
    values: dict[str, Any] = field(default_factory=dict)
    """The configuration file's, and the length as its ``context_len``."""
    length: int = 0
    """``infer_seq_length``."""
    verify: str = "once"
    """When to verify a bundle's checksums: "once", "always" or "never"."""


def backend_named(name: object) -> str:
    """One of BACKENDS; InvalidArgumentError for another."""
    found = _OTHER_NAMES.get(name, name) if isinstance(name, str) else name
    if found not in BACKENDS:
        others = ", ".join(f"{other} for {ours}" for other, ours in _OTHER_NAMES.items())
        raise InvalidArgumentError(
            f"backend must be one of {', '.join(BACKENDS)} (or {others}), not {name!r:.60}", param="backend"
        )
    return str(found)


def default_backend(running: object) -> str:
    """The backend where none is named: that of a model that is open already, else "graph"."""
    if isinstance(running, LLM):
        return running.info.mode
    return "lite" if isinstance(running, Model) else "graph"


def read_run_options(config: InferConfig, backend: str, **options: Any) -> RunOptions:
    """With the values of the configuration file, those that are the pipeline's own to decide refused by name.

    ``verify`` None leaves it to the file, where True is "always" and False is "never"; without either it is "once".
    """
    values = read_values(Path(config.config_path)) if config.config_path else {}
    stored = {True: "always", False: "never", None: "once"}[values.pop("verify", None)]
    verify = options.pop("verify", None)
    options["verify"] = stored if verify is None else check_verify(verify)
    for name, why in _PIPELINES_OWN.items():
        if name in values:
            raise InvalidArgumentError(f"{config.config_path}: {name} is for penstock.lite.Model: in a pipeline {why}")
    length = config.infer_seq_length
    if length and values.get("context_len", length) != length:
        raise InvalidArgumentError(
            f"infer_seq_length is {length}, and {config.config_path} has context_len {values['context_len']}",
            param="infer_seq_length",
        )
    if length:
        values["context_len"] = length
    return RunOptions(backend, values=values, length=length, **options)


@contextmanager
def bundle_for(source: Path, options: RunOptions) -> Iterator[Path]:
    """A bundle, or that which a checkpoint folder makes; either is verified."""
    from penstock.runtime.open import OpenOptions, bundle_of

    if not source.is_dir():
        open_verified(source, options.verify)[0].close()
        yield source
        return

    with bundle_of(source, options.scheme, options.network, OpenOptions(verify=options.verify)) as bundle:
        yield bundle


def open_generator(source: Path, options: RunOptions) -> Generator:
    """A bundle or a checkpoint folder, opened; an error names the length as the caller has given it."""
    try:
        return _open(source, options)
    except InvalidArgumentError as error:
        if options.length and error.param == "context_len":
            name = "infer_seq_length"
            raise InvalidArgumentError(error.naming(name), param=name, code=error.code) from None
        raise


def _open(source: Path, options: RunOptions) -> Generator:
    if options.backend == "lite":
        with bundle_for(source, options) as bundle:
            _check_scheme(source, bundle, options)
            return _open_lite(bundle, options)
    limits = _limits(options.values)
    mode = "eager" if options.backend == "eager" else "graph"
    return LLM(source, options.scheme, mode, options.threads, options.network, limits=limits, verify=options.verify)


def _check_scheme(source: Path, bundle: Path, options: RunOptions) -> None:
    if options.network is not None and not source.is_dir():
        raise InvalidArgumentError(
            f"network goes with a checkpoint folder; the bundle {bundle} holds its graph already", param="network"
        )
    with native.Model.open(bundle) as model:
        found = model.info.scheme
    if options.scheme is not None and options.scheme != found:
        raise InvalidArgumentError(
            f"scheme {options.scheme!r} was asked for, but the bundle {bundle} holds {found!r}", param="scheme"
        )


def _limits(values: dict[str, Any]) -> ProgramLimits:
    names = {"context_len": "context_len", "max_tokens": "max_tokens", "batch_size": "max_requests"}
    names |= {"kv_cache": "kv_layout", "weights": "weights"}
    limits = ProgramLimits(**{theirs: values[ours] for ours, theirs in names.items() if ours in values})
    return replace(limits, max_requests=min(limits.max_requests, limits.max_tokens))  # each has a token in a step


def _open_lite(bundle: Path, options: RunOptions) -> LiteGenerator:
    model = Model()
    model.build_from_file(bundle, ModelType.PENSTOCK, Context(thread_num=options.threads), options.values)
    return LiteGenerator(model, options.values.get("batch_size", _BATCH), owns_model=True)


def open_accelerated(source: Path, options: RunOptions) -> Generator:
    """A source whose graph chooses the tokens itself, as an export with ``--tail argmax`` makes it.

    The weights of a bundle are not copied: the file that is opened has a hole for them, which is filled by the pages of
    ``source``.  With the weights in huge pages, or where pages are too large to map segments, it is a whole file,
    for as long as it is read.
    """
    if options.backend == "eager":
        raise UnsupportedError(
            "is_sample_acceleration: eager mode has no graph to end in tokens: graph and lite have",
            param="is_sample_acceleration",
        )
    is_hollow = options.values.get("weights") != "huge" and can_map_segments()
    fixed = replace(options, scheme=None, network=None, verify="never")  # it is made of weights that were verified
    with bundle_for(source, options) as bundle, tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        file = Path(folder) / bundle.name
        stamp = with_tail(bundle, file, "argmax", hollow=is_hollow)
        generator = open_generator(file, fixed)
        try:
            if is_hollow:
                map_weights(_native(generator), bundle, stamp)
        except BaseException:
            generator.close()
            raise
    return generator


def _native(generator: Generator) -> native.Model:
    if isinstance(generator, LiteGenerator):
        return generator.model.native
    program = generator.engine.program  # type: ignore[attr-defined]
    model: native.Model = program.model
    return model
