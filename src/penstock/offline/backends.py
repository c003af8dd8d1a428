"""The backends of a pipeline: each opens a model that continues prompts of token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.checkpoint.generation import GenerationDefaults
from penstock.core import native
from penstock.core.memory import can_map_segments
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.file_kinds import is_gguf
from penstock.graph.replace_tail import map_weights, replace_tail
from penstock.lite.device import Context
from penstock.lite.model import Model
from penstock.lite.open_model import ModelType
from penstock.lite.settings import read_values
from penstock.llm.llm import LLM
from penstock.llm.result import Delta, Result
from penstock.offline.infer_config import FileConfig, InferConfig
from penstock.offline.lite_generator import LiteGenerator
from penstock.runtime.program import ProgramLimits
from penstock.runtime.temporary_folder import temporary_folder
from penstock.runtime.verify import check_verify, open_verified
from penstock.text.tokenizer import Tokenizer
from penstock.validation import refusal

__all__ = ["BACKENDS", "Answers", "Generator", "RunOptions", "backend_named", "check_running", "default_backend",
           "llm_options",
           "open_accelerated", "open_generator", "read_run_options"]  # fmt: skip

BACKENDS: Final = ("graph", "lite", "eager")
_OTHER_NAMES: Final = {"ms": "graph", "mslite": "lite"}
"""The names of backends in MindFormers."""
_BATCH: Final = 8
"""The batch size of the backend lite, unless the configuration file sets batch_size."""
_REFUSED_VALUES: Final = {"seq_len": "prompts have any length", "logits": "only the last row is used"}
"""Fields of a configuration file that a pipeline sets itself, with the reason."""


class Answers(Protocol):
    """An answer that is being generated; iterate for its Deltas."""

    def __iter__(self) -> Iterator[Delta]: ...

    def __next__(self) -> Delta: ...

    def abort(self) -> None:
        """Stop generating."""

    def result(self) -> Result:
        """Return the complete answer, once it has ended."""


class Generator(Protocol):
    """Continues prompts of token ids.  ``penstock.LLM`` and LiteGenerator implement it."""

    tokenizer: Tokenizer
    generation: GenerationDefaults

    def generate(self, prompts: Any, params: SamplingParams | list[SamplingParams]) -> Any:
        """Return a list of Results for a list of lists of token ids; ``params`` are those of all, or one for each."""

    def stream(self, prompt: Any, params: SamplingParams) -> Answers:
        """Begin the answer to one list of token ids."""

    def close(self) -> None:
        """Free the memory."""


@dataclass(frozen=True)
class RunOptions:
    """Options of a backend: ``scheme`` and ``network`` for a checkpoint folder, ``threads`` (0: all allowed cores)."""

    backend: str = "graph"
    scheme: str | None = None
    threads: int = 0
    network: str | None = None
    values: dict[str, Any] = field(default_factory=dict)
    """The values of the configuration file; ``context_len`` includes ``infer_seq_length``."""
    length: int = 0
    """``infer_seq_length``."""
    verify: str = "once"
    """The mode in which a bundle's checksums are verified: "once", "always" or "never"."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Options of LLM: the sizes of the group of processes that runs the model."""


def backend_named(name: object) -> str:
    """Return the name in BACKENDS for a name or an alias; InvalidArgumentError for any other."""
    backend = _OTHER_NAMES.get(name, name) if isinstance(name, str) else name
    if backend not in BACKENDS:
        aliases = ", ".join(f"{alias} for {own}" for alias, own in _OTHER_NAMES.items())
        raise refusal("backend", f"one of {', '.join(BACKENDS)} (or {aliases})", name)
    return str(backend)


def default_backend(running: object) -> str:
    """Return the default backend: that of the open model ``running``, otherwise "graph"."""
    if isinstance(running, LLM):
        return running.info.mode
    return "lite" if isinstance(running, Model) else "graph"


def check_running(options: Mapping[str, object]) -> None:
    """Raise InvalidArgumentError for an option that applies to opening a model, of one that is already open."""
    for name, value in options.items():
        if value not in (None, 0):
            raise InvalidArgumentError(f"{name}: cannot be set for a model that is already open", param=name)


def read_run_options(config: InferConfig, backend: str, **options: Any) -> RunOptions:
    """Return the options of a run, with the values of the configuration file.

    ``verify`` None takes the value of the file (True is "always", False is "never"), or "once" without one.
    InvalidArgumentError for a value of the file that a pipeline sets itself.
    """
    values = read_values(Path(config.config_path)) if config.config_path else {}
    stored = {True: "always", False: "never", None: "once"}[values.pop("verify", None)]
    verify = options.pop("verify", None)
    options["verify"] = stored if verify is None else check_verify(verify)
    for name, why in _REFUSED_VALUES.items():
        if name in values:
            raise InvalidArgumentError(
                f"{config.config_path}: {name} applies to penstock.lite.Model only: in a pipeline {why}", param=name
            )
    length = config.infer_seq_length
    if length and values.get("context_len", length) != length:
        raise InvalidArgumentError(
            f"infer_seq_length is {length}, but {config.config_path} has context_len {values['context_len']}",
            param="infer_seq_length",
        )
    if length:
        values["context_len"] = length
    ranks = config.ranks if isinstance(config, FileConfig) else {}
    if ranks and backend == "lite":
        raise UnsupportedError(
            "use_parallel: the backend lite runs a model in one process; use graph, or set use_parallel to false",
            param="use_parallel",
        )
    return RunOptions(backend, values=values, length=length, ranks=ranks, **options)


def llm_options(config: FileConfig) -> dict[str, Any]:
    """Return the options of LLM that a YAML file sets, as a pipeline with the backend graph would."""
    run = read_run_options(config, "graph", scheme=config.scheme)
    options: dict[str, Any] = {"scheme": run.scheme, "verify": run.verify, **run.ranks}
    if set(run.values) <= {"context_len"}:
        return options | run.values
    return options | {"limits": _limits(run.values)}


@contextmanager
def bundle_for(source: Path, options: RunOptions) -> Iterator[Path]:
    """Yield a verified bundle: ``source`` itself, or the bundle made from a checkpoint folder."""
    from penstock.runtime.open import OpenOptions, bundle_of

    if not source.is_dir() and not is_gguf(source):
        open_verified(source, options.verify)[0].close()
        yield source
        return

    with bundle_of(source, options.scheme, options.network, OpenOptions(verify=options.verify)) as bundle:
        yield bundle


def open_generator(source: Path, options: RunOptions) -> Generator:
    """Open a bundle or a checkpoint folder.  An error about the length names ``infer_seq_length`` if that set it."""
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
    own = {"limits": limits, "verify": options.verify}
    return LLM(source, options.scheme, mode, options.threads, options.network, **own, **options.ranks)  # type: ignore[arg-type]


def _check_scheme(source: Path, bundle: Path, options: RunOptions) -> None:
    if options.network is not None and not source.is_dir() and not is_gguf(source):
        raise InvalidArgumentError(
            f"network applies to checkpoint folders only; the bundle {bundle} contains its graph", param="network"
        )
    with native.Model.open(bundle) as model:
        scheme = model.info.scheme
    if options.scheme is not None and options.scheme != scheme:
        raise refusal("scheme", f"{scheme!r}, that of the bundle {bundle}", options.scheme)


def _limits(values: dict[str, Any]) -> ProgramLimits:
    names = {"context_len": "context_len", "max_tokens": "max_tokens", "batch_size": "max_requests"}
    names |= {"kv_cache": "kv_layout", "weights": "weights"}
    limits = ProgramLimits(**{theirs: values[own] for own, theirs in names.items() if own in values})
    return replace(limits, max_requests=min(limits.max_requests, limits.max_tokens))  # a token per request and step


def _open_lite(bundle: Path, options: RunOptions) -> LiteGenerator:
    model = Model()
    model.build_from_file(bundle, ModelType.PENSTOCK, Context(thread_num=options.threads), options.values)
    return LiteGenerator(model, options.values.get("batch_size", _BATCH), owns_model=True)


def open_accelerated(source: Path, options: RunOptions) -> Generator:
    """Open a source with a graph that chooses the tokens itself, like an export with ``--tail argmax``.

    The weights of a bundle are not copied: a temporary file has a hole in their place, and the pages of ``source`` are
    mapped there.  If the weights are kept in huge pages, or if pages are too large to map segments, the temporary file
    is a complete bundle, which is removed once it is open.
    """
    if options.backend == "eager":
        raise UnsupportedError(
            "is_sample_acceleration: not supported by the backend eager, which has no graph; use graph or lite",
            param="is_sample_acceleration",
        )
    is_hollow = options.values.get("weights") != "huge" and can_map_segments()
    fixed = replace(options, scheme=None, network=None, verify="never")  # the weights were verified already
    with bundle_for(source, options) as bundle, temporary_folder(None if is_hollow else bundle) as folder:
        file = Path(folder) / bundle.name
        stamp = replace_tail(bundle, file, "argmax", without_weights=is_hollow)
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
