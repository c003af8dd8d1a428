"""The op If with a condition that is known, and the ops that are refused by name."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from penstock.errors import UnsupportedError
from penstock.graph.general.draft import Tensor
from penstock.graph.general.sizes import SizeExpression, symbols_of
from penstock.graph.onnx.context import Site
from penstock.graph.onnx.model import OnnxGraph
from penstock.graph.onnx.registry import reads

__all__: list[str] = []

_REFUSED: Final = {
    "Loop": "loops are not supported; export the network without control flow",
    "Scan": "loops are not supported; export the network without control flow",
    **dict.fromkeys(
        ("SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength",
         "SequenceMap", "SplitToSequence", "ConcatFromSequence"),
        "sequences are not supported",
    ),
    **dict.fromkeys(("Optional", "OptionalGetElement", "OptionalHasElement"), "optional values are not supported"),
    **dict.fromkeys(
        ("StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch", "TfIdfVectorizer", "LabelEncoder"),
        "strings are not supported",
    ),
    **dict.fromkeys(
        ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"),
        "random numbers are not supported; make them an input",
    ),
    **dict.fromkeys(("NonZero", "Unique", "Compress"), "the size of its output depends on values, not on sizes"),
}  # fmt: skip


@reads(*_REFUSED)
def _refuse(site: Site) -> Tensor:
    raise UnsupportedError(_REFUSED[site.node.op])


@reads("If")
def _if(site: Site) -> tuple[Tensor | None, ...]:
    if not site.is_raw(0) or site.raw(0).dtype == object:
        raise site.refused(_why_open(site.x(0), site))
    condition = bool(site.raw(0).reshape(-1)[0])
    graph = site.attr("then_branch" if condition else "else_branch")
    site.expect(isinstance(graph, OnnxGraph) and site.run_graph is not None, "two graphs")
    results = site.run_graph(graph)  # type: ignore[misc]
    count = len(site.node.outputs)
    return tuple(results) if len(results) >= count else (None,) * count


def _why_open(condition: Tensor, site: Site) -> str:
    """Return why a condition is not known: the inputs and the free sizes, by the file's names, that it depends on."""
    producers = {id(output): call for call in site.draft.calls for output in call.outputs}
    numbers, tensors, sizes = set[str](), set[str](), set[str]()
    seen, waiting = set[int](), [condition]
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        call = producers.get(id(tensor))
        if tensor.value is not None:
            sizes |= _names_in(tensor.value) if tensor.value.dtype == object else set()  # others may be large weights
        elif call is not None:
            waiting.extend(value for value in call.inputs if value is not None)
            sizes.update(*map(_names_in, call.attrs.values()))
        else:
            (tensors if tensor.rank else numbers).add(tensor.name)
    if tensors:
        what = "inputs" if len(tensors) > 1 else "input"
        return (
            f"its condition depends on the values of {what} {_list(tensors)}, which differ from run to run; export the "
            "network without control flow"
        )
    sizes = {site.size_names.get(name, name) for name in sizes}
    fixed = " ".join(f"--size {name}=N" for name in sorted(numbers | sizes))
    return (
        f"its condition depends on {_list({f'the value of input {name}' for name in numbers} | _free(sizes))}; give a "
        f"number ({fixed})"
    )


def _names_in(value: Any) -> set[str]:
    items = np.asarray(value, object).flat
    return {symbol.name for item in items if isinstance(item, SizeExpression) for symbol in symbols_of(item)}


def _free(sizes: set[str]) -> set[str]:
    return {f"the free size {name}" for name in sizes}


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names))
