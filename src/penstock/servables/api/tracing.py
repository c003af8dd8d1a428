"""Recording: a method's function is called with symbolic values; each stage or model that it calls becomes a node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from penstock.errors import InvalidArgumentError
from penstock.servables.api.specs import Spec

__all__ = ["Node", "Outputs", "Trace", "Traced", "Value", "record", "trace"]


class Value:
    """What a method's function sees in place of data: it goes from step to step, and nothing else."""

    __slots__ = ("index", "name", "spec", "trace")

    def __init__(self, trace: Trace, name: str, spec: Spec) -> None:
        self.trace, self.name, self.spec = trace, name, spec
        self.index = len(trace.values)
        trace.values.append(self)

    def _refuse(self, *_: object) -> NoReturn:
        raise InvalidArgumentError(
            f"{self.name} is not there yet: a method only hands values from stage to stage; compute in a stage"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __mod__ = __pow__ = __matmul__ = __neg__ = __getitem__ = __call__ = _refuse
    __bool__ = __len__ = __iter__ = __int__ = __float__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


class Traced:
    """What a method may call.  ``parameters``: the names of its inputs in order; ``inputs`` None: it takes any."""

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
                f"{kind} {name}: its parameters are {', '.join(parameters)}, its inputs {', '.join(inputs)}"
            )
        if not parameters:
            raise InvalidArgumentError(f"{kind} {name} takes nothing")
        self.kind, self.name, self.parameters = kind, name, parameters
        self.inputs, self.outputs = inputs, outputs


@dataclass(frozen=True)
class Node:
    """A call of ``what``: indexes of the values that it takes, in the order of the parameters, and gives."""

    what: Traced
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Outputs:
    """Several outputs of a call: taken apart in order, or by name."""

    def __init__(self, values: dict[str, Value]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Value:
        if name not in self._values:
            raise InvalidArgumentError(f"there is no output {name!r}, but {', '.join(self._values)}")
        return self._values[name]

    def __iter__(self) -> Iterator[Value]:
        return iter(self._values.values())

    def __len__(self) -> int:
        return len(self._values)


class Trace:
    """The values and nodes of one method."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.is_over = False


def record(what: Traced, values: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The symbolic outputs of a call, whose arity and types are checked."""
    title = f"{what.kind} {what.name}"
    if len(values) > len(what.parameters):
        raise InvalidArgumentError(f"{title} takes {len(what.parameters)} values, not {len(values)}")
    given = dict(zip(what.parameters, values, strict=False))
    for name, value in named.items():
        if name not in what.parameters or name in given:
            raise InvalidArgumentError(f"{title} takes {', '.join(what.parameters)}, and {name} once alone")
        given[name] = value
    missing = [name for name in what.parameters if name not in given]
    if missing:
        raise InvalidArgumentError(f"{title} also takes {', '.join(missing)}")
    for name, value in given.items():
        if not isinstance(value, Value):
            raise InvalidArgumentError(f"{title}: {name} must be a value of the method, not {value!r:.100}")
        if value.trace.is_over or value.trace is not given[what.parameters[0]].trace:
            raise InvalidArgumentError(f"{title}: {name} is a value of another method")
        if what.inputs is not None and not what.inputs[name].takes(value.spec):
            raise InvalidArgumentError(f"{title}: {name} must be {what.inputs[name]}, but {value.name} is {value.spec}")
    found = given[what.parameters[0]].trace
    made = {name: Value(found, f"{what.name}.{name}", spec) for name, spec in what.outputs.items()}
    inputs = tuple(given[name].index for name in what.parameters)
    found.nodes.append(Node(what, inputs, tuple(one.index for one in made.values())))
    return next(iter(made.values())) if len(made) == 1 else Outputs(made)


def trace(
    function: Callable[..., Any], name: str, inputs: Mapping[str, Spec], outputs: Mapping[str, Spec]
) -> tuple[Trace, tuple[int, ...]]:
    """What a method's function chains, and the indexes of its outputs' values in their order."""
    found = Trace()
    given = {one: Value(found, one, spec) for one, spec in inputs.items()}
    returned = function(**given)
    found.is_over = True
    if isinstance(returned, Value):
        returned = (returned,)
    if isinstance(returned, Mapping) and not isinstance(returned, Outputs):
        if set(returned) != set(outputs):
            raise InvalidArgumentError(f"it returns {', '.join(map(str, returned))}; outputs are {', '.join(outputs)}")
        returned = [returned[one] for one in outputs]
    if not isinstance(returned, (tuple, list, Outputs)) or len(returned) != len(outputs):
        raise InvalidArgumentError(
            f"it must return {len(outputs)} values ({', '.join(outputs)}), not {returned!r:.100}"
        )
    indexes = []
    for (one, spec), value in zip(outputs.items(), returned, strict=True):
        if not isinstance(value, Value) or value.trace is not found:
            raise InvalidArgumentError(f"output {one} must be a value of this method, not {value!r:.100}")
        if not spec.takes(value.spec):
            raise InvalidArgumentError(f"output {one} must be {spec}, but {value.name} is {value.spec}")
        indexes.append(value.index)
    return found, tuple(indexes)
