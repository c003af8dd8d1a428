"""Tracing of methods: a method's function is called with symbolic values, and each call of a step becomes a node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from penstock.errors import InvalidArgumentError
from penstock.servables.api.specs import Spec

__all__ = ["CallNode", "MethodTrace", "Outputs", "SymbolicValue", "TracedUnit", "record_call", "trace_method"]


class SymbolicValue:
    """A stand-in for data while a method is traced.  It can only be passed to stages and models."""

    __slots__ = ("index", "name", "spec", "trace")

    def __init__(self, trace: MethodTrace, name: str, spec: Spec) -> None:
        self.trace, self.name, self.spec = trace, name, spec
        self.index = len(trace.values)
        trace.values.append(self)

    def _refuse(self, *_: object) -> NoReturn:
        raise InvalidArgumentError(
            f"{self.name} has no data yet: a method only passes values from stage to stage; compute in a stage",
            param=self.name,
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __mod__ = __pow__ = __matmul__ = __neg__ = __getitem__ = __call__ = _refuse
    __bool__ = __len__ = __iter__ = __int__ = __float__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


class TracedUnit:
    """A stage or a model, which a method may call.

    ``parameters``: the names of its inputs in order.  ``inputs``: their types; None accepts any.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        parameters: tuple[str, ...],
        inputs: dict[str, Spec] | None,
        outputs: dict[str, Spec],
    ) -> None:
        if inputs is not None and set(inputs) != set(parameters):
            raise InvalidArgumentError(
                f"{kind} {name}: its parameters ({', '.join(parameters)}) differ from its inputs ({', '.join(inputs)})",
                param="inputs",
            )
        if not parameters:
            raise InvalidArgumentError(f"{kind} {name}: expected at least one parameter")
        self.kind, self.name, self.parameters = kind, name, parameters
        self.inputs, self.outputs = inputs, outputs


@dataclass(frozen=True)
class CallNode:
    """A call of ``operation``: the indexes of the values it takes, in the order of its parameters, and returns."""

    operation: TracedUnit
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Outputs:
    """Several outputs of a call: unpack them in order, or index them by name."""

    def __init__(self, values: dict[str, SymbolicValue]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> SymbolicValue:
        if name not in self._values:
            raise InvalidArgumentError(
                f"unknown output {name!r}; the outputs are {', '.join(self._values)}", param="name"
            )
        return self._values[name]

    def __iter__(self) -> Iterator[SymbolicValue]:
        return iter(self._values.values())

    def __len__(self) -> int:
        return len(self._values)


class MethodTrace:
    """The values and nodes of one method."""

    def __init__(self) -> None:
        self.values: list[SymbolicValue] = []
        self.nodes: list[CallNode] = []
        self.is_over = False


def record_call(operation: TracedUnit, values: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Check the arguments of a call, add its node to the trace, and return its symbolic output or ``Outputs``."""
    title = f"{operation.kind} {operation.name}"
    if len(values) > len(operation.parameters):
        raise InvalidArgumentError(f"{title} takes {len(operation.parameters)} arguments, got {len(values)}")
    arguments = dict(zip(operation.parameters, values, strict=False))
    for name, value in named.items():
        if name not in operation.parameters:
            raise InvalidArgumentError(
                f"{title} takes {', '.join(operation.parameters)}; unknown argument {name}", param=name
            )
        if name in arguments:
            raise InvalidArgumentError(
                f"{title} takes {', '.join(operation.parameters)}; {name} was passed twice", param=name
            )
        arguments[name] = value
    missing = [name for name in operation.parameters if name not in arguments]
    if missing:
        raise InvalidArgumentError(f"{title}: missing arguments: {', '.join(missing)}", param=missing[0])
    for name, value in arguments.items():
        if not isinstance(value, SymbolicValue):
            raise InvalidArgumentError(f"{title}: {name} must be a value of the method, got {value!r:.100}", param=name)
    trace = arguments[operation.parameters[0]].trace
    for name, value in arguments.items():
        if trace.is_over or value.trace is not trace:
            raise InvalidArgumentError(f"{title}: {name} is a value of another method", param=name)
        if operation.inputs is not None and not operation.inputs[name].accepts(value.spec):
            raise InvalidArgumentError(
                f"{title}: {name} must be {operation.inputs[name]}, but {value.name} is {value.spec}", param=name
            )
    outputs = {name: SymbolicValue(trace, f"{operation.name}.{name}", spec) for name, spec in operation.outputs.items()}
    inputs = tuple(arguments[name].index for name in operation.parameters)
    trace.nodes.append(CallNode(operation, inputs, tuple(output.index for output in outputs.values())))
    return next(iter(outputs.values())) if len(outputs) == 1 else Outputs(outputs)


def trace_method(
    function: Callable[..., Any], inputs: Mapping[str, Spec], outputs: Mapping[str, Spec]
) -> tuple[MethodTrace, tuple[int, ...]]:
    """Call a method's function with symbolic values; return its trace and the indexes of its outputs in order.

    Raises InvalidArgumentError if the function does not return values of the types in ``outputs``.
    """
    trace = MethodTrace()
    arguments = {name: SymbolicValue(trace, name, spec) for name, spec in inputs.items()}
    returned = function(**arguments)
    trace.is_over = True
    if isinstance(returned, SymbolicValue):
        returned = (returned,)
    if isinstance(returned, Mapping) and not isinstance(returned, Outputs):
        if set(returned) != set(outputs):
            raise InvalidArgumentError(
                f"it returns {', '.join(map(str, returned))}; the outputs are {', '.join(outputs)}", param="outputs"
            )
        returned = [returned[name] for name in outputs]
    if not isinstance(returned, (tuple, list, Outputs)) or len(returned) != len(outputs):
        raise InvalidArgumentError(
            f"it must return {len(outputs)} values ({', '.join(outputs)}), got {returned!r:.100}", param="outputs"
        )
    indexes = []
    for (name, spec), value in zip(outputs.items(), returned, strict=True):
        if not isinstance(value, SymbolicValue) or value.trace is not trace:
            raise InvalidArgumentError(f"output {name} must be a value of this method, got {value!r:.100}", param=name)
        if not spec.accepts(value.spec):
            raise InvalidArgumentError(f"output {name} must be {spec}, but {value.name} is {value.spec}", param=name)
        indexes.append(value.index)
    return trace, tuple(indexes)
