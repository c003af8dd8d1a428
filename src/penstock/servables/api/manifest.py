"""The manifest of a servable: units of work, and the steps of each method through them.

The process that imports servable.py sends the manifest to the primary as JSON.  The primary never imports servable.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

from penstock.errors import InvalidArgumentError, InvalidFileError
from penstock.servables.api.batch_rules import BatchRules
from penstock.servables.api.settings import Settings, check_cores
from penstock.servables.api.specs import Spec, parse_spec, parse_specs

__all__ = [
    "LanguageManifest",
    "MethodManifest",
    "MethodStep",
    "ModelManifest",
    "ServableManifest",
    "Unit",
    "manifest_from_json",
    "manifest_to_json",
    "model_from_json",
    "model_to_json",
]

KINDS: Final = ("stages", "model", "language_model")


@dataclass(frozen=True)
class Unit:
    """Work that runs in one trip to a process: consecutive Python stages, a model or a language model.

    ``kind``: one of KINDS.  ``names``: the names of its stages, or of its model.  ``rules`` is None if the stages take
    one instance at a time; a language model makes its own batches and has None, too.
    """

    kind: str
    names: tuple[str, ...]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    rules: BatchRules | None


@dataclass(frozen=True)
class MethodStep:
    """The use of a unit in a method: indexes of the values that it takes and returns."""

    unit: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class MethodManifest:
    """The steps of a method in an order that respects their dependencies.

    The inputs of the method are the first of its ``num_values`` values.  ``max_open``: the maximum number of open
    requests; 0 means no limit.
    """

    name: str
    inputs: dict[str, Spec]
    outputs: dict[str, Spec]
    num_values: int
    output_values: tuple[int, ...]
    steps: tuple[MethodStep, ...]
    max_open: int


@dataclass(frozen=True)
class ModelManifest:
    """A model file, its inputs and outputs, the number of processes that run it and of threads in each.

    ``cores``: those of each process; empty: any.
    """

    path: str
    inputs: dict[str, Spec]
    outputs: dict[str, Spec]
    rules: BatchRules
    instances: int
    threads: int
    cores: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.cores and len(check_cores(self.cores)) != self.instances:
            raise InvalidArgumentError(
                f"instances: expected {len(self.cores)}, got {self.instances}", param="instances"
            )


@dataclass(frozen=True)
class LanguageManifest:
    """A language model.

    ``path``: a bundle, or a GGUF file or checkpoint folder that ``scheme`` may quantize.  ``served``: instead, the
    name of a model that the service serves.  ``sampling``: fields of SamplingParams.  ``max_open`` prompts run at the
    same time, and ``max_waiting`` may wait.
    """

    path: str
    served: str
    scheme: str | None
    sampling: dict[str, Any]
    max_open: int
    max_waiting: int


@dataclass(frozen=True)
class ServableManifest:
    """A whole servable.  ``models``: by path, which is the name in the model's unit.

    ``languages``: in the order of the numbers that name their units.
    """

    settings: Settings
    methods: tuple[MethodManifest, ...]
    units: tuple[Unit, ...]
    models: dict[str, ModelManifest]
    languages: tuple[LanguageManifest, ...]

    @property
    def has_python(self) -> bool:
        """Return True if the servable has Python stages."""
        return any(unit.kind == "stages" for unit in self.units)


def manifest_to_json(manifest: ServableManifest) -> str:
    """Serialize a manifest."""
    return json.dumps(_to_plain(manifest))


def model_to_json(model: ModelManifest) -> str:
    """Serialize the manifest of a model, for the process that runs it."""
    return json.dumps(_to_plain(model))


def model_from_json(text: str) -> ModelManifest:
    """Deserialize the manifest of a model."""
    return _parse_model(json.loads(text))


def _to_plain(value: Any) -> Any:
    if isinstance(value, Spec):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: _to_plain(item) for name, item in value.items()}
    return [_to_plain(item) for item in value] if isinstance(value, list | tuple) else value


def manifest_from_json(text: str) -> ServableManifest:
    """Deserialize a manifest and check that its numbers are in bounds; raise InvalidFileError if they are not."""
    try:
        parsed = json.loads(text)
        manifest = ServableManifest(
            Settings(**parsed["settings"]),
            tuple(_parse_method(method) for method in parsed["methods"]),
            tuple(_parse_unit(unit) for unit in parsed["units"]),
            {name: _parse_model(model) for name, model in parsed["models"].items()},
            tuple(LanguageManifest(**language) for language in parsed["languages"]),
        )
        for method in manifest.methods:
            _check_steps(method, manifest.units)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise InvalidFileError(
            f"the process sent an invalid manifest of the servable: {error!r:.200}", code="invalid_manifest"
        ) from error
    return manifest


def _parse_rules(parsed: dict[str, Any] | None) -> BatchRules | None:
    return None if parsed is None else BatchRules(**parsed)


def _parse_unit(parsed: dict[str, Any]) -> Unit:
    inputs, outputs = (tuple(parse_spec(spec, name) for spec in parsed[name]) for name in ("inputs", "outputs"))
    if parsed["kind"] not in KINDS or not inputs or not outputs:
        raise ValueError(f"a unit of kind {parsed['kind']!r:.40}")
    return Unit(parsed["kind"], tuple(map(str, parsed["names"])), inputs, outputs, _parse_rules(parsed["rules"]))


def _parse_model(parsed: dict[str, Any]) -> ModelManifest:
    inputs, outputs = (parse_specs(parsed.pop(name), name) for name in ("inputs", "outputs"))
    rules = _parse_rules(parsed.pop("rules"))
    if rules is None:
        raise ValueError("a model without rules")
    cores = tuple(map(tuple, parsed.pop("cores")))
    return ModelManifest(inputs=inputs, outputs=outputs, rules=rules, cores=cores, **parsed)


def _parse_method(parsed: dict[str, Any]) -> MethodManifest:
    inputs, outputs = (parse_specs(parsed.pop(name), name) for name in ("inputs", "outputs"))
    steps = tuple(
        MethodStep(step["unit"], tuple(step["inputs"]), tuple(step["outputs"])) for step in parsed.pop("steps")
    )
    output_values = tuple(parsed.pop("output_values"))
    return MethodManifest(inputs=inputs, outputs=outputs, output_values=output_values, steps=steps, **parsed)


def _check_steps(method: MethodManifest, units: tuple[Unit, ...]) -> None:
    """Check that each value is made exactly once, before it is used."""
    known = set(range(len(method.inputs)))
    for step in method.steps:
        unit = units[step.unit]
        if (len(step.inputs), len(step.outputs)) != (len(unit.inputs), len(unit.outputs)) or step.unit < 0:
            raise ValueError("a step that does not fit its unit")
        if not known.issuperset(step.inputs) or known.intersection(step.outputs):
            raise ValueError("steps out of order")
        known.update(step.outputs)
    if not known.issuperset(method.output_values) or len(method.output_values) != len(method.outputs):
        raise ValueError("outputs that no step makes")
    if any(not 0 <= value < method.num_values for value in known):
        raise ValueError("values out of range")
