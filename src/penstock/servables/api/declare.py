"""The functions and decorators of servable.py; ``Declarations`` collects what they declare."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Final, ParamSpec, SupportsIndex, TypeVar

from penstock.config import check_integer, check_number
from penstock.errors import InvalidArgumentError
from penstock.servables.api.batch_rules import MAX_BATCH_SIZE, BatchRules
from penstock.servables.api.settings import MAX_PROCESSES, Settings, check_cores
from penstock.servables.api.specs import Spec, parse_specs
from penstock.servables.api.tracing import SymbolicValue, TracedUnit, record_call
from penstock.validation import refusal

__all__ = [
    "Declarations", "InputError", "Language", "Model", "Stage", "collect_declarations", "folder", "language_model",
    "method", "model", "run_stages_of", "settings", "stage",
    "version",
]  # fmt: skip

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_P = ParamSpec("_P")
_T = TypeVar("_T")
MAX_OPEN: Final = 65_536
MAX_DELAY_MS: Final = 1_000_000_000
TEXT_SPEC: Final = Spec("TEXT", ())


class InputError(Exception):
    """Raise this in a stage when the client's input is not usable: the client gets status 400 with this message.

    ``instance``: the index in the batch of the instance at fault, an integer of any type.  A stage without
    ``batch_size`` may omit it.  An index outside the batch, or of a row of padding, is not reported to the client.
    """

    def __init__(self, message: str, instance: SupportsIndex | None = None) -> None:
        super().__init__(message)
        self.instance = instance


class Stage(TracedUnit):
    """A Python function as a step of methods.

    Calling it with values of a method adds a step to the method.  Any other call runs the function.
    """

    def __init__(self, function: Callable[..., Any], specs: _StageSpecs, rules: BatchRules | None) -> None:
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise InvalidArgumentError(
                f"stage: expected a plain function (not async), got {function!r:.100}", param="stage"
            )
        name = getattr(function, "__name__", "")
        if not _NAME.fullmatch(name):
            raise InvalidArgumentError(f"stage: expected a function with a name, got {function!r:.100}", param="stage")
        self.function, self.rules = function, rules
        super().__init__("stage", name, _parameters(function, f"stage {name}"), specs.inputs, specs.outputs)
        _current_declarations().add_stage(self)

    def __call__(self, *values: Any, **named: Any) -> Any:
        """Add a step to the method that is being traced, or run the function on plain values."""
        if any(isinstance(value, SymbolicValue) for value in (*values, *named.values())):
            return record_call(self, values, named)
        return self.function(*values, **named)


@dataclass(frozen=True)
class _StageSpecs:
    inputs: dict[str, Spec] | None
    outputs: dict[str, Spec]


class Model(TracedUnit):
    """A model file in the folder of a version.  Separate processes run it."""

    def __init__(self, path: str, specs: tuple[dict[str, Spec], dict[str, Spec]], rules: BatchRules) -> None:
        self.path, self.rules = path, rules
        self.instances = 1
        self.cores: tuple[tuple[int, ...], ...] = ()
        inputs, outputs = specs
        super().__init__("model", path, tuple(inputs), inputs, outputs)
        _current_declarations().add_model(self)

    def __call__(self, *values: Any, **named: Any) -> Any:
        """Add a step to the method that is being traced."""
        return record_call(self, values, named)


class Language(TracedUnit):
    """A language model: a bundle, GGUF file or checkpoint folder of a version, or a model that the service serves."""

    def __init__(self, path: str, served: str, scheme: str | None, sampling: Mapping[str, Any]) -> None:
        self.path, self.served, self.scheme, self.sampling = path, served, scheme, dict(sampling)
        self.max_open = 0
        super().__init__("language_model", path or served, ("prompt",), {"prompt": TEXT_SPEC}, {"text": TEXT_SPEC})
        _current_declarations().languages.append(self)

    def __call__(self, *values: Any, **named: Any) -> Any:
        """Add a step to the method that is being traced."""
        return record_call(self, values, named)


@dataclass(frozen=True)
class Method:
    """A function that chains steps.

    ``line``: its line number in servable.py.  ``max_open``: the maximum number of open requests; 0 means no limit.
    """

    name: str
    function: Callable[..., Any]
    inputs: dict[str, Spec]
    outputs: dict[str, Spec]
    line: int
    max_open: int = 0


class Declarations:
    """Everything that one servable.py declares.  ``folder`` and ``version`` are those of the version being loaded."""

    def __init__(self, folder: Path | None = None, version: str = "") -> None:
        self.folder, self.version = folder, version
        self.stages: dict[str, Stage] = {}
        self.models: dict[str, Model] = {}
        self.languages: list[Language] = []
        self.methods: dict[str, Method] = {}
        self.settings: Settings | None = None

    def add_stage(self, stage: Stage) -> None:
        """Add a stage; raise InvalidArgumentError if its name is taken."""
        if stage.name in self.stages:
            raise InvalidArgumentError(f"stage {stage.name} is declared twice", code="declared_twice")
        self.stages[stage.name] = stage

    def add_model(self, model: Model) -> None:
        """Add a model; raise InvalidArgumentError if its file is declared already."""
        if model.path in self.models:
            raise InvalidArgumentError(
                f"model {model.path} is declared twice; call the first declaration twice instead", param="path"
            )
        self.models[model.path] = model

    def add_method(self, method: Method) -> None:
        """Add a method; raise InvalidArgumentError if its name is taken."""
        if method.name in self.methods:
            raise InvalidArgumentError(f"method {method.name} is declared twice", code="declared_twice")
        self.methods[method.name] = method


_collecting: list[Declarations] = []
_running: list[Declarations] = []
"""The declarations whose stages this process runs."""


def _current_declarations() -> Declarations:
    """Return where declarations go.  A module that a test imports outside of a collection has its own."""
    return _collecting[-1] if _collecting else Declarations()


@contextmanager
def collect_declarations(folder: Path | None = None, version: str = "") -> Iterator[Declarations]:
    """Collect all declarations made inside the ``with`` block, in any thread.  Only one collection may be open."""
    declared = Declarations(folder, version)
    _collecting.append(declared)
    try:
        yield declared
    finally:
        _collecting.remove(declared)


def run_stages_of(declared: Declarations) -> None:
    """Set whose stages this process runs: ``folder()`` and ``version()`` return theirs from now on."""
    _running[:] = [declared]


def _loaded_declarations() -> Declarations:
    """Return the declarations that are being collected, or those whose stages run here."""
    return (_collecting or _running or [Declarations()])[-1]


def _naming_options(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a function that names its options where it is called with an unknown one."""
    known = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]

    @wraps(function)
    def checked(*args: _P.args, **named: _P.kwargs) -> _T:
        if unknown := named.keys() - set(inspect.signature(function).parameters):
            name = function.__name__
            raise InvalidArgumentError(
                f"{name}: expected only {', '.join(known)}, got {', '.join(sorted(unknown))}", param=min(unknown)
            )
        return function(*args, **named)

    return checked


@_naming_options
def stage(
    *,
    outputs: Mapping[str, str],
    inputs: Mapping[str, str] | None = None,
    batch_size: int | None = None,
    preferred_sizes: Sequence[int] = (),
    max_delay_ms: float = 0.0,
    padded_sizes: Sequence[int] = (),
) -> Callable[[Callable[..., Any]], Stage]:
    """Make a Python function a stage.  Decorator.

    Without ``batch_size`` the function is called with one instance at a time, without the batch dimension.  With it,
    the function is called with arrays [n, ...] of up to ``batch_size`` instances.  An element of TEXT is a ``str``, an
    element of BYTES is a ``bytes`` object.

    ``outputs``: types by name.  The function returns one value, or a tuple or dictionary of several.
    ``inputs``: types by name; by default the stage accepts whatever the method passes.
    ``preferred_sizes``, ``max_delay_ms``, ``padded_sizes``: see ``model``; they require ``batch_size``.
    Raises InvalidArgumentError.
    """
    specs = _StageSpecs(None if inputs is None else parse_specs(inputs, "inputs"), parse_specs(outputs, "outputs"))
    if batch_size is None and (preferred_sizes or max_delay_ms or padded_sizes):
        raise InvalidArgumentError(
            "preferred_sizes, max_delay_ms and padded_sizes require batch_size", param="batch_size"
        )
    rules = None if batch_size is None else _batch_rules(batch_size, preferred_sizes, max_delay_ms, padded_sizes)
    return lambda function: Stage(function, specs, rules)


@_naming_options
def model(
    path: str,
    *,
    inputs: Mapping[str, str] | None = None,
    outputs: Mapping[str, str] | None = None,
    batch_size: int = 1,
    preferred_sizes: Sequence[int] = (),
    max_delay_ms: float = 0.0,
    padded_sizes: Sequence[int] = (),
    instances: int | Sequence[Sequence[int]] = 1,
) -> Model:
    """Declare a general network, a bundle (.psm) or an ONNX file (.onnx), in the folder of the version.

    ``inputs``, ``outputs``: the types of one instance by tensor name; by default those of the bundle.
    ``batch_size``: the maximum number of instances in a batch.
    ``preferred_sizes``: a batch that reaches one of these sizes runs at once.
    ``max_delay_ms``: the longest time in milliseconds that an instance waits for others to join its batch.
    ``padded_sizes``: the only batch sizes that the model accepts; smaller batches are padded.
    ``instances``: the number of processes that run the model, or the cores of each: [(0, 1), (2, 3)] starts two
    processes, each with two cores of its own.
    Raises InvalidArgumentError.
    """
    rules = _batch_rules(batch_size, preferred_sizes, max_delay_ms, padded_sizes)
    declared = Model(_check_model_file(path), _model_specs(path, inputs, outputs), rules)
    declared.cores = check_cores(instances) if isinstance(instances, list | tuple) else ()
    declared.instances = check_integer("instances", len(declared.cores) or instances, 1, MAX_PROCESSES)
    return declared


def language_model(
    path: str = "", *, served: str = "", scheme: str | None = None, max_open: int = 32, **sampling: Any
) -> Language:
    """Declare a language model from TEXT[] to TEXT[].  Workers of the service run it.

    ``path``: a bundle (.psm), a GGUF file or a checkpoint folder (config.json, tokenizer.json, *.safetensors) in the
    folder of the version; "." is the folder of the version itself.
    ``served``: instead of ``path``, the name of a model that the service serves.
    ``scheme``: the quantization scheme of a checkpoint; the default is the service's ``--scheme``.
    ``max_open``: the maximum number of prompts of this servable that run at the same time; others wait.
    ``sampling``: fields of SamplingParams (``max_tokens``, ...).
    Raises InvalidArgumentError.
    """
    if bool(path) == bool(served):
        raise InvalidArgumentError(
            "language_model: pass either a path in the version's folder or served=NAME", param="language_model"
        )
    from penstock.engine.params import SamplingParams

    try:
        SamplingParams(**sampling)
    except TypeError as error:
        raise InvalidArgumentError(f"language_model: {error}", param="language_model") from None
    if sampling.get("n", 1) != 1 or sampling.get("best_of", 1) != 1:
        raise InvalidArgumentError(
            "language_model returns one text per prompt: n and best_of must be 1",
            param="n" if sampling.get("n", 1) != 1 else "best_of",
        )
    if path:
        _check_inside(path)
    if scheme is not None:
        from penstock.quant.scheme import find_scheme

        if served or path.endswith(".psm"):
            raise InvalidArgumentError(
                "language_model: scheme requires a checkpoint folder; a bundle has its own scheme",
                param="language_model",
            )
        find_scheme(scheme)
    declared = Language(path, served, scheme, sampling)
    declared.max_open = check_integer("max_open", max_open, 1, MAX_OPEN)
    return declared


@_naming_options
def method(
    *, inputs: Mapping[str, str | Spec], outputs: Mapping[str, str | Spec], max_open: int | None = None
) -> Callable[[_Function], _Function]:
    """Make a function a method, which clients call.  Decorator.

    The parameters of the function are ``inputs``.  It passes them to stages and models and returns ``outputs``.  It is
    called once, when the servable is loaded, to record its steps.

    ``max_open``: the maximum number of open requests of this method; more are refused with 429.  By default only the
    limit of the service applies.
    Raises InvalidArgumentError.
    """
    limit = 0 if max_open is None else check_integer("max_open", max_open, 1, MAX_OPEN)
    input_specs, output_specs = parse_specs(inputs, "inputs"), parse_specs(outputs, "outputs")

    def declare(function: _Function) -> _Function:
        name = getattr(function, "__name__", "")
        if not _NAME.fullmatch(name):
            raise InvalidArgumentError(
                f"method: expected a function with a name, got {function!r:.100}", param="method"
            )
        parameters = _parameters(function, f"method {name}")
        if set(parameters) != set(input_specs):
            raise InvalidArgumentError(
                f"method {name}: its parameters ({', '.join(parameters) or 'none'}) "
                f"differ from its inputs ({', '.join(input_specs)})",
                param=name,
            )
        line = function.__code__.co_firstlineno
        _current_declarations().add_method(Method(name, function, input_specs, output_specs, line, limit))
        return function

    return declare


def settings(**named: Any) -> None:
    """Set how the servable runs.  All of these are optional: ``workers``, ``timeout_s``, ``memory_limit_mib``,
    ``model_threads``, ``max_waiting``, ``max_batch_mib``, ``versions``, ``labels``, ``default_method``.

    Raises InvalidArgumentError.
    """
    declared = _current_declarations()
    if declared.settings is not None:
        raise InvalidArgumentError("settings() is called twice; call it once", param="settings")
    try:
        declared.settings = Settings(**named)
    except TypeError:
        names = ", ".join(Settings.__dataclass_fields__)
        raise InvalidArgumentError(
            f"settings: expected only {names}, got {', '.join(named)}", param="settings"
        ) from None


def folder() -> Path:
    """Return the folder of the version that is being loaded or served.  Stages may call this, too."""
    declared = _loaded_declarations()
    if declared.folder is None:
        raise InvalidArgumentError(
            "servable.folder() is available only when a service runs servable.py", param="folder"
        )
    return declared.folder


def version() -> str:
    """Return the number of the version that is being loaded or served.  Stages may call this, too."""
    declared = _loaded_declarations()
    if not declared.version:
        raise InvalidArgumentError(
            "servable.version() is available only when a service runs servable.py", param="version"
        )
    return declared.version


def _batch_rules(batch_size: int, preferred: Sequence[int], max_delay_ms: float, padded: Sequence[int]) -> BatchRules:
    check_number("max_delay_ms", max_delay_ms, MAX_DELAY_MS, may_be_zero=True)
    return BatchRules(
        max_size=check_integer("batch_size", batch_size, 1, MAX_BATCH_SIZE),
        preferred_sizes=_as_tuple("preferred_sizes", preferred),
        max_delay_s=max_delay_ms / 1000,
        padded_sizes=_as_tuple("padded_sizes", padded),
    )


def _as_tuple(name: str, value: object) -> tuple[Any, ...]:
    """Return the elements of a sequence; BatchRules checks them."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise refusal(name, "a tuple like (2, 4)", value)
    return tuple(value)


def _check_model_file(path: object) -> str:
    """Return the path of a model file; the error for a language model points to ``language_model``."""
    _check_inside(path)
    if isinstance(path, str) and path.endswith((".psm", ".onnx")):
        return path
    kind = "a language model" if Path(str(path)).suffix.lower() in (".gguf", "") else "not a supported format"
    raise InvalidArgumentError(
        f"servable.model: expected a file that ends in .psm or .onnx; {str(path)!r:.100} is {kind}. Declare language "
        "models with servable.language_model.",
        param="servable.model",
    )


def _model_specs(
    path: str, inputs: Mapping[str, str] | None, outputs: Mapping[str, str] | None
) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """Return the types of a model: those that are declared, or those of its bundle."""
    if inputs is not None and outputs is not None:
        return parse_specs(inputs, "inputs"), parse_specs(outputs, "outputs")
    if not path.endswith(".psm"):
        raise InvalidArgumentError(
            f"servable.model: expected inputs= and outputs= for {path}; only a bundle (.psm) has them itself",
            param="outputs" if inputs is not None else "inputs",
        )
    from penstock.servables.api.signature import signature_of

    own_inputs, own_outputs = signature_of(folder() / path)
    return (
        own_inputs if inputs is None else parse_specs(inputs, "inputs"),
        own_outputs if outputs is None else parse_specs(outputs, "outputs"),
    )


def _check_inside(path: object) -> None:
    if not isinstance(path, str) or not path or Path(path).is_absolute() or ".." in Path(path).parts:
        raise refusal("path", "a relative path inside the version's folder", path)


def _parameters(function: Callable[..., Any], title: str) -> tuple[str, ...]:
    """Return the names of a function's parameters, except those with defaults."""
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InvalidArgumentError(f"{title}: expected named parameters only, got {parameter}")
    return tuple(parameter.name for parameter in parameters if parameter.default is parameter.empty)
