"""Builds a manifest from declarations: methods are traced, and their nodes are grouped into units.

Python stages with equal batch rules run in one trip to a process if nothing else lies between them.  The depth of a
node is the number of trips before it; stages with the same depth and rules form one unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidArgumentError
from penstock.servables.api.declare import Declarations, Language, Method, Model, Stage
from penstock.servables.api.manifest import (
    LanguageManifest,
    MethodManifest,
    MethodStep,
    ModelManifest,
    ServableManifest,
    Unit,
)
from penstock.servables.api.settings import Settings
from penstock.servables.api.tracing import CallNode, MethodTrace, trace_method
from penstock.validation import refusal

if TYPE_CHECKING:
    from penstock.servables.api.specs import Spec

__all__ = ["StageCall", "StageProgram", "build_manifest"]


@dataclass(frozen=True)
class StageCall:
    """The call of one stage in a unit.

    ``names``: its parameters.  ``inputs``, ``outputs``: the indexes of its arguments and results.  ``shared``: whether
    each argument must be copied first, because others use it and the stage may change it.  ``specs``: of its outputs.
    """

    stage: Stage
    names: tuple[str, ...]
    inputs: tuple[int, ...]
    shared: tuple[bool, ...]
    outputs: tuple[int, ...]
    specs: tuple[Spec, ...]


@dataclass(frozen=True)
class StageProgram:
    """A unit of Python stages as its process runs it.  ``inputs`` and ``outputs`` are indexes of values."""

    unit: Unit
    inputs: tuple[int, ...]
    calls: tuple[StageCall, ...]
    outputs: tuple[int, ...]


def build_manifest(declared: Declarations) -> tuple[ServableManifest, dict[int, StageProgram]]:
    """Return the manifest, and by unit the programs of Python stages.

    Raises InvalidArgumentError, which names the line of the method at fault.
    """
    if not declared.methods:
        raise InvalidArgumentError("servable.py declares no method; add one with @servable.method")
    settings = declared.settings or Settings()
    builder = _ManifestBuilder(settings)
    methods = []
    for method in declared.methods.values():
        try:
            methods.append(builder.add_method(method))
        except InvalidArgumentError as error:
            raise error.with_message(f"line {method.line}: method {method.name}: {error}") from error
    unused = [model.path for model in declared.models.values() if model.path not in builder.models]
    if unused:
        raise InvalidArgumentError(f"the model {unused[0]} is not used by any method")
    if settings.default_method and settings.default_method not in declared.methods:
        raise refusal("default_method", f"one of {', '.join(declared.methods)}", settings.default_method)
    manifest = ServableManifest(
        settings, tuple(methods), tuple(builder.units), builder.models, tuple(builder.languages)
    )
    return manifest, builder.programs


class _ManifestBuilder:
    """The units and models of all methods; methods share the units of models."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.units: list[Unit] = []
        self.programs: dict[int, StageProgram] = {}
        self.models: dict[str, ModelManifest] = {}
        self.languages: list[LanguageManifest] = []
        self._model_units: dict[int, int] = {}  # by id() of the model

    def add_method(self, method: Method) -> MethodManifest:
        """Trace a method and divide it into steps."""
        trace, outputs = trace_method(method.function, method.inputs, method.outputs)
        _check_used(trace, outputs)
        if not trace.nodes:
            raise InvalidArgumentError("it calls no stage and no model")
        steps = [self._add_step(trace, nodes, outputs) for nodes in _group_nodes(trace)]
        num_values, limit = len(trace.values), method.max_open
        return MethodManifest(method.name, method.inputs, method.outputs, num_values, outputs, tuple(steps), limit)

    def _add_step(self, trace: MethodTrace, nodes: list[CallNode], outputs: tuple[int, ...]) -> MethodStep:
        operation = nodes[0].operation
        if isinstance(operation, Stage):
            return self._add_stages(trace, nodes, outputs)
        if id(operation) not in self._model_units:
            self._model_units[id(operation)] = len(self.units)
            name, rules = str(len(self.languages)), None
            if isinstance(operation, Model):
                name, rules = operation.name, operation.rules
                self.models[operation.path] = ModelManifest(
                    operation.path, operation.inputs or {}, operation.outputs, rules, operation.instances,
                    self._settings.model_threads, operation.cores,
                )  # fmt: skip
            elif isinstance(operation, Language):
                self.languages.append(self._plan_language(operation))
            inputs = tuple((operation.inputs or {}).values())
            self.units.append(Unit(operation.kind, (name,), inputs, tuple(operation.outputs.values()), rules))
        return MethodStep(self._model_units[id(operation)], nodes[0].inputs, nodes[0].outputs)

    def _plan_language(self, model: Language) -> LanguageManifest:
        max_waiting = self._settings.max_waiting
        return LanguageManifest(model.path, model.served, model.scheme, model.sampling, model.max_open, max_waiting)

    def _add_stages(self, trace: MethodTrace, nodes: list[CallNode], outputs: tuple[int, ...]) -> MethodStep:
        produced = {value for node in nodes for value in node.outputs}
        used_elsewhere = {value for node in trace.nodes if node not in nodes for value in node.inputs} | {*outputs}
        consumed = tuple(dict.fromkeys(value for node in nodes for value in node.inputs if value not in produced))
        returned = tuple(value for node in nodes for value in node.outputs if value in used_elsewhere)
        uses = [value for node in nodes for value in node.inputs] + [*returned]
        calls = []
        for node in nodes:
            stage = node.operation
            if isinstance(stage, Stage):
                shared = tuple(uses.count(value) > 1 for value in node.inputs)
                specs = tuple(stage.outputs.values())
                calls.append(StageCall(stage, stage.parameters, node.inputs, shared, node.outputs, specs))
        names = tuple(call.stage.name for call in calls)
        input_specs, output_specs = (tuple(trace.values[value].spec for value in side) for side in (consumed, returned))
        unit = Unit("stages", names, input_specs, output_specs, calls[0].stage.rules)
        self.programs[len(self.units)] = StageProgram(unit, consumed, tuple(calls), returned)
        self.units.append(unit)
        return MethodStep(len(self.units) - 1, consumed, returned)


def _check_used(trace: MethodTrace, outputs: tuple[int, ...]) -> None:
    """Refuse a call whose result is not used."""
    used = {value for node in trace.nodes for value in node.inputs} | {*outputs}
    for node in trace.nodes:
        if not used.intersection(node.outputs):
            raise InvalidArgumentError(f"the result of {node.operation.kind} {node.operation.name} is not used")


def _group_nodes(trace: MethodTrace) -> list[list[CallNode]]:
    """Return groups of nodes that run in one trip, each group after those that it depends on."""
    sources: dict[int, tuple[int, Any]] = {}  # by value: the trips before it, and the kind of group that makes it
    groups: dict[tuple[int, Any], list[CallNode]] = {}
    for node in trace.nodes:
        operation = node.operation
        kind = ("stages", operation.rules) if isinstance(operation, Stage) else ("node", id(node))
        depth = 0
        for value in node.inputs:
            if value in sources:
                source_depth, source_kind = sources[value]
                depth = max(depth, source_depth if source_kind == kind else source_depth + 1)
        for value in node.outputs:
            sources[value] = (depth, kind)
        groups.setdefault((depth, kind), []).append(node)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]
