"""The op If with a condition that is known, and the ops that are refused by name."""

from __future__ import annotations

from typing import Final

from penstock.errors import UnsupportedError
from penstock.graph.general.draft import Tensor
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
    **dict.fromkeys(
        ("NonZero", "Unique", "Compress", "NonMaxSuppression"), "the size of its output depends on values, not on sizes"
    ),
}  # fmt: skip


@reads(*_REFUSED)
def _refuse(site: Site) -> Tensor:
    raise UnsupportedError(_REFUSED[site.node.op])


@reads("If")
def _if(site: Site) -> tuple[Tensor | None, ...]:
    site.require(
        site.is_raw(0) and site.raw(0).dtype != object,
        "its condition depends on values or on free sizes; fix the sizes of the inputs, or export without control flow",
    )
    condition = bool(site.raw(0).reshape(-1)[0])
    graph = site.attr("then_branch" if condition else "else_branch")
    site.expect(isinstance(graph, OnnxGraph) and site.run_graph is not None, "two graphs")
    results = site.run_graph(graph)  # type: ignore[misc]
    count = len(site.node.outputs)
    return tuple(results) if len(results) >= count else (None,) * count
