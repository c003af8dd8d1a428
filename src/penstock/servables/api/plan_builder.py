"""From declarations to a plan: methods are traced, and their nodes grouped into units that run at once.

Python stages with equal rules for batches run in one trip where nothing lies between them: a node's depth is the number
of hops that lie before it, and stages of one depth and one set of rules are a unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidArgumentError
from penstock.servables.api.declare import Declarations, Language, Method, Model, Settings, Stage
from penstock.servables.api.plan import LanguagePlan, MethodPlan, ModelPlan, Plan, Step, Unit
from penstock.servables.api.tracing import Node, Trace, trace

if TYPE_CHECKING:
    from penstock.servables.api.specs import Spec
    from penstock.servables.schedule.batcher import BatchRules

__all__ = ["Call", "Program", "make_plan"]


@dataclass(frozen=True)
class Call:
    """One stage of a unit: its function, the places of its arguments and of what it gives, and whether to copy what
    others take, too, before it may change it.
    """

    stage: Stage
    names: tuple[str, ...]
    inputs: tuple[int, ...]
    shared: tuple[bool, ...]
    outputs: tuple[int, ...]
    specs: tuple[Spec, ...]


@dataclass(frozen=True)
class Program:
    """A unit of Python stages as its process runs it; places are numbers of values."""

    unit: Unit
    inputs: tuple[int, ...]
    calls: tuple[Call, ...]
    outputs: tuple[int, ...]


def make_plan(declared: Declarations) -> tuple[Plan, dict[int, Program]]:
    """The plan, and of units of Python stages how they run; InvalidArgumentError names the line of a method."""
    if not declared.methods:
        raise InvalidArgumentError("it declares no method (@servable.method)")
    settings = declared.settings or Settings()
    maker = _Maker(settings)
    methods = []
    for method in declared.methods.values():
        try:
            methods.append(maker.method(method))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"line {method.line}: method {method.name}: {error}") from error
    unused = [one.path for one in declared.models.values() if one.path not in maker.models]
    if unused:
        raise InvalidArgumentError(f"the model {unused[0]} is used by no method")
    if settings.default_method and settings.default_method not in declared.methods:
        raise InvalidArgumentError(
            f"default_method {settings.default_method!r} is none of {', '.join(declared.methods)}"
        )
    plan = Plan(settings, tuple(methods), tuple(maker.units), maker.models, tuple(maker.languages))
    return plan, maker.programs


class _Maker:
    """Units and models of all methods."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.units: list[Unit] = []
        self.programs: dict[int, Program] = {}
        self.models: dict[str, ModelPlan] = {}
        self.languages: list[LanguagePlan] = []
        self._known: dict[int, int] = {}  # units of models, by id: methods share them

    def method(self, method: Method) -> MethodPlan:
        """Trace and cut up one method."""
        found, outputs = trace(method.function, method.name, method.inputs, method.outputs)
        _check_used(found, outputs)
        if not found.nodes:
            raise InvalidArgumentError("it calls no stage and no model")
        groups = _grouped(found)
        steps = [self._step(found, nodes, outputs) for nodes in groups]
        num_values, limit = len(found.values), method.max_open
        return MethodPlan(method.name, method.inputs, method.outputs, num_values, outputs, tuple(steps), limit)

    def _language(self, what: Language) -> LanguagePlan:
        waiting = self._settings.max_waiting
        return LanguagePlan(what.path, what.served, what.scheme, what.sampling, what.max_open, waiting)

    def _step(self, found: Trace, nodes: list[Node], outputs: tuple[int, ...]) -> Step:
        what = nodes[0].what
        if isinstance(what, Stage):
            return self._stages(found, nodes, outputs)
        if id(what) not in self._known:
            self._known[id(what)] = len(self.units)
            rules = None
            if isinstance(what, Model):
                rules = what.rules
                self.models[what.path] = ModelPlan(
                    what.path, what.inputs or {}, what.outputs, rules, what.instances, self._settings.model_threads
                )
            elif isinstance(what, Language):
                self.languages.append(self._language(what))
            name = what.name if rules is not None else str(len(self.languages) - 1)
            inputs = tuple((what.inputs or {}).values())
            self.units.append(Unit(what.kind, (name,), inputs, tuple(what.outputs.values()), rules))
        return Step(self._known[id(what)], nodes[0].inputs, nodes[0].outputs)

    def _stages(self, found: Trace, nodes: list[Node], outputs: tuple[int, ...]) -> Step:
        made = {one for node in nodes for one in node.outputs}
        elsewhere = {one for node in found.nodes if node not in nodes for one in node.inputs} | {*outputs}
        taken = tuple(dict.fromkeys(one for node in nodes for one in node.inputs if one not in made))
        given = tuple(one for node in nodes for one in node.outputs if one in elsewhere)
        uses = [one for node in nodes for one in node.inputs] + [*given]
        calls = []
        for node in nodes:
            stage = node.what
            if isinstance(stage, Stage):
                shared = tuple(uses.count(one) > 1 for one in node.inputs)
                specs = tuple(stage.outputs.values())
                calls.append(Call(stage, stage.parameters, node.inputs, shared, node.outputs, specs))
        values = found.values
        names = tuple(one.stage.name for one in calls)
        specs_in, specs_out = (tuple(values[one].spec for one in ones) for ones in (taken, given))
        unit = Unit("stages", names, specs_in, specs_out, calls[0].stage.rules)
        self.programs[len(self.units)] = Program(unit, taken, tuple(calls), given)
        self.units.append(unit)
        return Step(len(self.units) - 1, taken, given)


def _check_used(found: Trace, outputs: tuple[int, ...]) -> None:
    """Nothing runs whose result nobody takes."""
    used = {one for node in found.nodes for one in node.inputs} | {*outputs}
    for node in found.nodes:
        if not used.intersection(node.outputs):
            raise InvalidArgumentError(f"what {node.what.kind} {node.what.name} gives is not used")


def _grouped(found: Trace) -> list[list[Node]]:
    """Nodes that run in one trip, in an order in which each follows those that it waits for."""
    depths: dict[int, tuple[int, Any]] = {}  # of values: hops before it, and what made it
    groups: dict[tuple[int, Any], list[Node]] = {}
    for node in found.nodes:
        kind = ("stages", _rules_of(node)) if isinstance(node.what, Stage) else ("node", id(node))
        hops = 0
        for one in node.inputs:
            if one in depths:
                before, made_by = depths[one]
                hops = max(hops, before if made_by == kind else before + 1)
        for one in node.outputs:
            depths[one] = (hops, kind)
        groups.setdefault((hops, kind), []).append(node)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


def _rules_of(node: Node) -> BatchRules | None:
    return node.what.rules if isinstance(node.what, Stage) else None
