"""A graph that ends in token ids instead of logits: for a device that only ever takes the likeliest."""

from __future__ import annotations

from penstock.errors import InvalidArgumentError
from penstock.graph.ir import Dim, DType, Graph, Node, Operand, Value

__all__ = ["append_tail", "check_tail"]


def check_tail(tail: str) -> tuple[str, int]:
    """ "argmax" or "topk:K" as an op and its number of ids; InvalidArgumentError for anything else."""
    kind, colon, count = tail.partition(":")
    if kind == "argmax" and not colon:
        return kind, 1
    if kind == "topk" and count.isascii() and count.isdecimal() and len(count) < 6 and int(count) > 0:
        return kind, int(count)
    raise InvalidArgumentError(f"tail must be argmax or topk:K, K ids of each row, not {tail!r:.40}", param="tail")


def append_tail(graph: Graph, tail: str) -> None:
    """Ends a graph whose output is logits [R, vocab] in their argmax, int32 [R], or in the ids of the K greatest, int32
    [R, K], greatest first, with the logits beside them.
    """
    op, count = check_tail(tail)
    if count > graph.vocab_size:
        raise InvalidArgumentError(f"tail {tail}: the model has only {graph.vocab_size} tokens", param="tail")
    rows, logits = Dim("R", 1), Operand("value", graph.output)
    ids = Value(f"tail:{op}", DType.I32, (rows,) if op == "argmax" else (rows, Dim(None, 0, count)))
    outputs = [ids.name]
    if op == "topk":
        best = Value("tail:logits", DType.F32, (rows, Dim(None, 0, count)))
        graph.values[best.name] = best
        outputs.insert(0, best.name)
    graph.values[ids.name] = ids
    graph.nodes.append(Node(op, "tail", [logits], outputs, {"k": count} if op == "topk" else {}))
    graph.output = ids.name
