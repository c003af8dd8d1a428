"""What a process found in a servable.py: units of work, and the way of each method through them.  It goes as JSON from
the process that imported the file to the primary, which never does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

from penstock.errors import InvalidFileError
from penstock.servables.api.declare import Settings
from penstock.servables.api.specs import Spec, read_spec, read_specs
from penstock.servables.schedule.batcher import BatchRules

__all__ = [
    "LanguagePlan",
    "MethodPlan",
    "ModelPlan",
    "Plan",
    "Step",
    "Unit",
    "read_model",
    "read_plan",
    "write_model",
    "write_plan",
]

KINDS: Final = ("stages", "model", "language_model")


@dataclass(frozen=True)
class Unit:
    """What runs at once: consecutive Python stages, a model or a language model.

    ``names`` are those of its stages, or its model's.  ``rules`` None: its stages take one instance at a time (and a
    language model makes its own batches).
    """

    kind: str
    names: tuple[str, ...]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    rules: BatchRules | None


@dataclass(frozen=True)
class Step:
    """A unit's place in a method: indexes of the values that it takes and gives."""

    unit: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class MethodPlan:
    """The steps of a method, each after those that it waits for.  Its inputs are the first values.  ``max_open``
    requests at a time, 0 for no limit.
    """

    name: str
    inputs: dict[str, Spec]
    outputs: dict[str, Spec]
    num_values: int
    output_values: tuple[int, ...]
    steps: tuple[Step, ...]
    max_open: int


@dataclass(frozen=True)
class ModelPlan:
    """A model file, what it takes and gives, and how many processes of how many threads run it."""

    path: str
    inputs: dict[str, Spec]
    outputs: dict[str, Spec]
    rules: BatchRules
    instances: int
    threads: int


@dataclass(frozen=True)
class LanguagePlan:
    """A language model: ``path`` of a bundle or a checkpoint's folder, which ``scheme`` may quantize, or the name
    ``served``; fields of SamplingParams; how many prompts it works on at a time, and how many may wait.
    """

    path: str
    served: str
    scheme: str | None
    sampling: dict[str, Any]
    max_open: int
    max_waiting: int


@dataclass(frozen=True)
class Plan:
    """A whole servable: of models and language models by name, the unit's."""

    settings: Settings
    methods: tuple[MethodPlan, ...]
    units: tuple[Unit, ...]
    models: dict[str, ModelPlan]
    languages: tuple[LanguagePlan, ...]

    @property
    def has_python(self) -> bool:
        """Whether there are Python stages."""
        return any(one.kind == "stages" for one in self.units)


def write_plan(plan: Plan) -> str:
    """As JSON."""
    return json.dumps(_plain(plan))


def write_model(model: ModelPlan) -> str:
    """As JSON, for the process that runs it."""
    return json.dumps(_plain(model))


def read_model(text: str) -> ModelPlan:
    """The model's plan again."""
    return _model(json.loads(text))


def _plain(value: Any) -> Any:
    if isinstance(value, Spec):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def read_plan(text: str) -> Plan:
    """The plan again, all its numbers in bounds; InvalidFileError for anything else."""
    try:
        found = json.loads(text)
        plan = Plan(
            Settings(**found["settings"]),
            tuple(_method(one) for one in found["methods"]),
            tuple(_unit(one) for one in found["units"]),
            {name: _model(one) for name, one in found["models"].items()},
            tuple(LanguagePlan(**one) for one in found["languages"]),
        )
        for method in plan.methods:
            _check(method, plan.units)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise InvalidFileError(f"what the process says of the servable makes no sense: {error!r:.200}") from error
    return plan


def _rules(found: dict[str, Any] | None) -> BatchRules | None:
    return None if found is None else BatchRules(**found)


def _unit(found: dict[str, Any]) -> Unit:
    inputs, outputs = (tuple(read_spec(one, name) for one in found[name]) for name in ("inputs", "outputs"))
    if found["kind"] not in KINDS or not inputs or not outputs:
        raise ValueError(f"a unit of kind {found['kind']!r:.40}")
    return Unit(found["kind"], tuple(map(str, found["names"])), inputs, outputs, _rules(found["rules"]))


def _model(found: dict[str, Any]) -> ModelPlan:
    inputs, outputs = (read_specs(found.pop(name), name) for name in ("inputs", "outputs"))
    rules = _rules(found.pop("rules"))
    if rules is None:
        raise ValueError("a model without rules")
    return ModelPlan(inputs=inputs, outputs=outputs, rules=rules, **found)


def _method(found: dict[str, Any]) -> MethodPlan:
    inputs, outputs = (read_specs(found.pop(name), name) for name in ("inputs", "outputs"))
    steps = tuple(Step(one["unit"], tuple(one["inputs"]), tuple(one["outputs"])) for one in found.pop("steps"))
    places = tuple(found.pop("output_values"))
    return MethodPlan(inputs=inputs, outputs=outputs, output_values=places, steps=steps, **found)


def _check(method: MethodPlan, units: tuple[Unit, ...]) -> None:
    """Each value is made once, before it is taken."""
    known = set(range(len(method.inputs)))
    for step in method.steps:
        unit = units[step.unit]
        if (len(step.inputs), len(step.outputs)) != (len(unit.inputs), len(unit.outputs)) or step.unit < 0:
            raise ValueError("a step that does not fit its unit")
        if not known.issuperset(step.inputs) or known.intersection(step.outputs):
            raise ValueError("steps out of order")
        known.update(step.outputs)
    if not known.issuperset(method.output_values) or len(method.output_values) != len(method.outputs):
        raise ValueError("outputs that nobody makes")
    if any(not 0 <= one < method.num_values for one in known):
        raise ValueError("values out of range")
