"""An ONNX file as plain Python: graphs, nodes and arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from numpy.typing import NDArray

__all__ = ["MAX_DEPTH", "MAX_NODES", "Function", "OnnxGraph", "OnnxNetwork", "OnnxNode", "OnnxPort", "Reference"]

MAX_NODES: Final = 200_000
"""The largest number of nodes that a file may run, with functions inlined."""
MAX_DEPTH: Final = 16
"""The depth of graphs and functions inside each other."""

Attrs: TypeAlias = dict[str, Any]


@dataclass(eq=False)
class OnnxNode:
    """A node.  ``attrs``: numbers, strings, lists, arrays, ``OnnxGraph``, or a ``Reference`` inside a function."""

    op: str
    domain: str
    name: str
    inputs: list[str]
    outputs: list[str]
    attrs: Attrs
    source: Any = None


@dataclass(frozen=True)
class Reference:
    """The value of an attribute of the function around a node."""

    name: str


@dataclass(frozen=True)
class OnnxPort:
    """An input or output: ``dims`` are numbers, names or None; None if the file gives no shape."""

    name: str
    kind: str
    element: int
    dims: tuple[int | str | None, ...] | None


@dataclass(eq=False)
class OnnxGraph:
    """A graph, or the graph inside a node.  ``constants``: arrays, or functions that return one."""

    name: str
    nodes: list[OnnxNode]
    constants: dict[str, NDArray[Any] | Callable[[], NDArray[Any]]] = field(default_factory=dict)
    inputs: list[OnnxPort] = field(default_factory=list)
    outputs: list[OnnxPort] = field(default_factory=list)


@dataclass(eq=False)
class Function:
    """A function of a file, or the body that the standard gives an op."""

    inputs: list[str]
    outputs: list[str]
    nodes: list[OnnxNode]
    defaults: Attrs
    opsets: dict[str, int]


@dataclass(eq=False)
class OnnxNetwork:
    """A file."""

    graph: OnnxGraph
    opsets: dict[str, int]
    functions: dict[tuple[str, str], Function]
    properties: dict[str, str] = field(default_factory=dict)
