"""What servable.py says: stages, models and methods as they are declared, kept in a Declarations."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, SupportsIndex, TypeVar

from penstock.errors import InvalidArgumentError
from penstock.servables.api.specs import Spec, read_specs
from penstock.servables.api.tracing import Traced, Value, record
from penstock.servables.lifecycle.versions import Policy, Wanted
from penstock.servables.schedule.batcher import MAX_BATCH_SIZE, BatchRules

__all__ = [
    "Declarations", "InputError", "Language", "Model", "Settings", "Stage", "declaring", "folder", "language_model",
    "method", "model", "run_stages_of", "settings", "stage",
    "version",
]  # fmt: skip

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_Function = TypeVar("_Function", bound=Callable[..., Any])
MAX_PROCESSES: Final = 256
MAX_OPEN: Final = 65_536
MAX_DELAY_MS: Final = 1_000_000_000
TEXT_SPEC: Final = Spec("TEXT", ())


class InputError(Exception):
    """Raise it in a stage when what a client sent cannot be used: status 400 with this text.

    ``instance``: which one of those that a stage with a batch was given, a whole number of any kind; a stage without
    one needs not say it.  The client is told no instance for what is none of them, as a row of padding is.
    """

    def __init__(self, message: str, instance: SupportsIndex | None = None) -> None:
        super().__init__(message)
        self.instance = instance


class Stage(Traced):
    """A Python function as a step: called with values of a method it records itself, else it is the function."""

    def __init__(self, function: Callable[..., Any], specs: _StageSpecs, rules: BatchRules | None) -> None:
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise InvalidArgumentError(f"a stage is a plain function, not {function!r:.100}")
        name = getattr(function, "__name__", "")
        if not _NAME.fullmatch(name):
            raise InvalidArgumentError(f"a stage's function needs a name, unlike {function!r:.100}")
        self.function, self.rules = function, rules
        super().__init__("stage", name, _parameters(function, f"stage {name}"), specs.inputs, specs.outputs)
        _declared().add_stage(self)

    def __call__(self, *values: Any, **named: Any) -> Any:
        """Record the step, or call the function when no value of a method is given."""
        if any(isinstance(one, Value) for one in (*values, *named.values())):
            return record(self, values, named)
        return self.function(*values, **named)


@dataclass(frozen=True)
class _StageSpecs:
    inputs: dict[str, Spec] | None
    outputs: dict[str, Spec]


class Model(Traced):
    """A model file of the version's folder, run by processes of its own."""

    def __init__(self, path: str, specs: tuple[dict[str, Spec], dict[str, Spec]], rules: BatchRules) -> None:
        self.path, self.rules = path, rules
        self.instances = 1
        inputs, outputs = specs
        super().__init__("model", path, tuple(inputs), inputs, outputs)
        _declared().add_model(self)

    def __call__(self, *values: Any, **named: Any) -> Any:
        """Record the step."""
        return record(self, values, named)


class Language(Traced):
    """A language model: a bundle or a checkpoint's folder in the version's folder, or the name of one that is served
    beside.
    """

    def __init__(self, path: str, served: str, scheme: str | None, sampling: Mapping[str, Any]) -> None:
        self.path, self.served, self.scheme, self.sampling = path, served, scheme, dict(sampling)
        self.max_open = 0
        super().__init__("language_model", path or served, ("prompt",), {"prompt": TEXT_SPEC}, {"text": TEXT_SPEC})
        _declared().languages.append(self)

    def __call__(self, *values: Any, **named: Any) -> Any:
        """Record the step."""
        return record(self, values, named)


@dataclass(frozen=True)
class Method:
    """A function that chains steps; ``line`` is where it stands in its file.  ``max_open`` 0: no limit of its own."""

    name: str
    function: Callable[..., Any]
    inputs: dict[str, Spec]
    outputs: dict[str, Spec]
    line: int
    max_open: int = 0


@dataclass(frozen=True)
class Settings:
    """How a servable runs.  ``workers``: processes for its Python stages; ``timeout_s`` of a batch in a process;
    ``memory_limit_mib`` of a process, above which it is replaced between batches; ``model_threads`` of each process
    that runs a model; ``max_waiting``: instances that may wait for a stage or model, more are refused with 429;
    ``max_batch_mib``: of the inputs that go together in a batch (one instance that is larger goes alone);
    ``versions`` and ``labels``: the policy; ``default_method``: what the servable's bare name means.
    """

    workers: int = 1
    timeout_s: float = 30.0
    memory_limit_mib: int | None = None
    model_threads: int = 1
    max_waiting: int = 4096
    max_batch_mib: int = 64
    versions: str = "latest:1"
    labels: dict[str, int] = field(default_factory=dict)
    default_method: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot be, by name."""
        _whole("workers", self.workers, 1, MAX_PROCESSES)
        _whole("model_threads", self.model_threads, 1, 1024)
        _whole("max_waiting", self.max_waiting, 1, 1 << 30)
        _whole("max_batch_mib", self.max_batch_mib, 1, 512)
        if (
            isinstance(self.timeout_s, bool)
            or not isinstance(self.timeout_s, int | float)
            or not (0 < self.timeout_s <= 86400)
        ):
            raise InvalidArgumentError(f"timeout_s must be above 0 and up to 86400, not {self.timeout_s!r}")
        if self.memory_limit_mib is not None:
            _whole("memory_limit_mib", self.memory_limit_mib, 16, 1 << 24)
        if not isinstance(self.versions, str):
            raise InvalidArgumentError(f'versions must be like "latest:2", "all" or "1,3", not {self.versions!r:.100}')
        if not isinstance(self.labels, dict):
            raise InvalidArgumentError(f'labels must be like {{"stable": 1}}, not {self.labels!r:.100}')
        Wanted(Policy.parse(self.versions), self.labels)  # refuses what is in them
        if not isinstance(self.default_method, str):
            raise InvalidArgumentError(f"default_method must be a method's name, not {self.default_method!r:.100}")


class Declarations:
    """All that one servable.py declares.  ``folder`` is that of the version whose files it uses."""

    def __init__(self, folder: Path | None = None, version: str = "") -> None:
        self.folder, self.version = folder, version
        self.stages: dict[str, Stage] = {}
        self.models: dict[str, Model] = {}
        self.languages: list[Language] = []
        self.methods: dict[str, Method] = {}
        self.settings: Settings | None = None

    def add_stage(self, one: Stage) -> None:
        """Refuse a name that is taken."""
        if one.name in self.stages:
            raise InvalidArgumentError(f"there are two stages {one.name}")
        self.stages[one.name] = one

    def add_model(self, one: Model) -> None:
        """Refuse a file that is declared already."""
        if one.path in self.models:
            raise InvalidArgumentError(f"the model {one.path} is declared twice: call the first one twice instead")
        self.models[one.path] = one

    def add_method(self, one: Method) -> None:
        """Refuse a name that is taken."""
        if one.name in self.methods:
            raise InvalidArgumentError(f"there are two methods {one.name}")
        self.methods[one.name] = one


_state: list[Declarations] = []
_running: list[Declarations] = []
"""The declarations whose stages this process runs."""


def _declared() -> Declarations:
    """Where declarations go: a module that is imported by others, as in a test of its functions, has its own."""
    return _state[-1] if _state else Declarations()


@contextmanager
def declaring(folder: Path | None = None, version: str = "") -> Iterator[Declarations]:
    """Collect what is declared meanwhile, in this thread or any other: one at a time."""
    found = Declarations(folder, version)
    _state.append(found)
    try:
        yield found
    finally:
        _state.remove(found)


def run_stages_of(declared: Declarations) -> None:
    """From now on this process runs the stages of these declarations: ``folder`` and ``version`` are theirs."""
    _running[:] = [declared]


def _known() -> Declarations:
    """The declarations that are being collected, or whose stages run."""
    return (_state or _running or [Declarations()])[-1]


def stage(
    *,
    outputs: Mapping[str, str],
    inputs: Mapping[str, str] | None = None,
    batch_size: int | None = None,
    preferred_sizes: Sequence[int] = (),
    max_delay_ms: float = 0.0,
    padded_sizes: Sequence[int] = (),
) -> Callable[[Callable[..., Any]], Stage]:
    """A function as a step, ``outputs`` saying what it returns: one value, or a tuple or dictionary of several.

    Without ``batch_size`` it is called with one instance at a time, without the batch dimension.  With it, with up to
    so many: arrays of shape [n, ...] with the batch dimension in front.  Texts are ``str``, bytes are ``bytes``.
    ``inputs`` may say what it expects; else it takes what the method gives it.
    """
    specs = _StageSpecs(None if inputs is None else read_specs(inputs, "inputs"), read_specs(outputs, "outputs"))
    if batch_size is None and (preferred_sizes or max_delay_ms or padded_sizes):
        raise InvalidArgumentError("preferred_sizes, max_delay_ms and padded_sizes go with batch_size")
    rules = None if batch_size is None else _rules(batch_size, preferred_sizes, max_delay_ms, padded_sizes)
    return lambda function: Stage(function, specs, rules)


def model(
    path: str,
    *,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    batch_size: int = 1,
    preferred_sizes: Sequence[int] = (),
    max_delay_ms: float = 0.0,
    padded_sizes: Sequence[int] = (),
    instances: int = 1,
) -> Model:
    """A model file of the version's folder (.onnx).  It gets batches of up to ``batch_size`` instances, of
    ``padded_sizes`` alone where those are given; ``instances`` processes run it.
    """
    rules = _rules(batch_size, preferred_sizes, max_delay_ms, padded_sizes)
    found = Model(_model_file(path), (read_specs(inputs, "inputs"), read_specs(outputs, "outputs")), rules)
    found.instances = _whole("instances", instances, 1, MAX_PROCESSES)
    return found


def language_model(
    path: str = "", *, served: str = "", scheme: str | None = None, max_open: int = 32, **sampling: Any
) -> Language:
    """A language model from TEXT[] to TEXT[], run by workers of the service: a bundle (.psm) or a checkpoint's folder
    (config.json, tokenizer.json, *.safetensors) of the version's folder, "." for that itself; or the one that is
    ``served`` beside under that name.  ``scheme``: how a checkpoint is quantized, unless as the service's others are.
    ``max_open``: prompts of this servable that it works on at a time; others wait.
    ``sampling`` are fields of SamplingParams (``max_tokens``, ...).
    """
    if bool(path) == bool(served):
        raise InvalidArgumentError("language_model takes a path in the version's folder, or served=NAME")
    from penstock.engine.params import SamplingParams

    try:
        SamplingParams(**sampling)
    except TypeError as error:
        raise InvalidArgumentError(f"language_model: {error}") from None
    if sampling.get("n", 1) != 1 or sampling.get("best_of", 1) != 1:
        raise InvalidArgumentError("language_model gives one text for a prompt: n and best_of are 1")
    if path:
        _inside(path)
    if scheme is not None:
        from penstock.quant.scheme import find_scheme

        if served or path.endswith(".psm"):
            raise InvalidArgumentError("language_model: scheme goes with a checkpoint's folder: a bundle has its own")
        find_scheme(scheme)
    found = Language(path, served, scheme, sampling)
    found.max_open = _whole("max_open", max_open, 1, MAX_OPEN)
    return found


def method(
    *, inputs: Mapping[str, str], outputs: Mapping[str, str], max_open: int | None = None
) -> Callable[[_Function], _Function]:
    """What clients call: a function whose parameters are ``inputs``, and which calls stages and models with them.

    It is called once, when the servable is loaded, to see what it chains.  ``max_open`` requests of it may be open at
    a time, the next is refused with 429; as many as the service has unless given.
    """
    limit = 0 if max_open is None else _whole("max_open", max_open, 1, MAX_OPEN)
    read_inputs, read_outputs = read_specs(inputs, "inputs"), read_specs(outputs, "outputs")

    def take(function: _Function) -> _Function:
        name = getattr(function, "__name__", "")
        if not _NAME.fullmatch(name):
            raise InvalidArgumentError(f"a method is a function with a name, unlike {function!r:.100}")
        found = _parameters(function, f"method {name}")
        if set(found) != set(read_inputs):
            raise InvalidArgumentError(
                f"method {name}: its parameters are {', '.join(found) or 'none'}, its inputs {', '.join(read_inputs)}"
            )
        line = function.__code__.co_firstlineno
        _declared().add_method(Method(name, function, read_inputs, read_outputs, line, limit))
        return function

    return take


def settings(**named: Any) -> None:
    """How the servable runs: ``workers``, ``timeout_s``, ``memory_limit_mib``, ``model_threads``, ``max_waiting``,
    ``max_batch_mib``, ``versions``, ``labels``, ``default_method``; each is optional.
    """
    declared = _declared()
    if declared.settings is not None:
        raise InvalidArgumentError("settings are given twice")
    try:
        declared.settings = Settings(**named)
    except TypeError:
        known = ", ".join(Settings.__dataclass_fields__)
        raise InvalidArgumentError(f"settings are {known}, not {', '.join(named)}") from None


def folder() -> Path:
    """The folder of the version that is loaded: where its files are.  Stages may call it, too."""
    declared = _known()
    if declared.folder is None:
        raise InvalidArgumentError("servable.folder() is known only where the service runs the file")
    return declared.folder


def version() -> str:
    """The number of the version that is loaded.  Stages may call it, too."""
    declared = _known()
    if not declared.version:
        raise InvalidArgumentError("servable.version() is known only where the service runs the file")
    return declared.version


def _rules(batch_size: int, preferred: Sequence[int], max_delay_ms: float, padded: Sequence[int]) -> BatchRules:
    if (
        isinstance(max_delay_ms, bool)
        or not isinstance(max_delay_ms, int | float)
        or not 0 <= max_delay_ms <= MAX_DELAY_MS
    ):
        raise InvalidArgumentError(
            f"max_delay_ms must be a number from 0 to {MAX_DELAY_MS:,}, not {max_delay_ms!r:.100}"
        )
    return BatchRules(
        max_size=_whole("batch_size", batch_size, 1, MAX_BATCH_SIZE),
        preferred_sizes=_sizes("preferred_sizes", preferred),
        max_delay_s=max_delay_ms / 1000,
        padded_sizes=_sizes("padded_sizes", padded),
    )


def _sizes(name: str, value: object) -> tuple[Any, ...]:
    """What BatchRules looks at one by one."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidArgumentError(f"{name} must be like (2, 4), not {value!r:.100}")
    return tuple(value)


def _whole(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgumentError(f"{name} must be a whole number from {low} to {high}, not {value!r:.100}")
    return value


def _model_file(path: object) -> str:
    """A model's file; what is a language model is told so by name."""
    _inside(path)
    if isinstance(path, str) and path.endswith(".onnx"):
        return path
    what = "a language model" if Path(str(path)).suffix in (".psm", "") else "nothing that is run here"
    raise InvalidArgumentError(
        f"servable.model takes a file that ends in .onnx, and {str(path)!r:.100} is {what}: bundles (.psm) and "
        "checkpoints' folders (config.json, *.safetensors) go to servable.language_model"
    )


def _inside(path: object) -> None:
    if not isinstance(path, str) or not path or Path(path).is_absolute() or ".." in Path(path).parts:
        raise InvalidArgumentError(f"a model lies in the version's folder, unlike {path!r:.100}")


def _parameters(function: Callable[..., Any], what: str) -> tuple[str, ...]:
    """The names of a function's parameters; those with defaults may be left out of calls, not of this."""
    found = inspect.signature(function).parameters.values()
    for one in found:
        if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            raise InvalidArgumentError(f"{what}: its parameters are named one by one, unlike {one}")
    return tuple(one.name for one in found if one.default is one.empty)
