"""End a graph in token ids instead of logits, for devices that always take the likeliest tokens."""

from __future__ import annotations

from penstock.errors import InvalidArgumentError
from penstock.graph.ir import Dim, DType, Graph, Node, Operand, Value
from penstock.validation import refusal

__all__ = ["append_tail", "check_tail"]


def check_tail(tail: str) -> tuple[str, int]:
    """Return the op and the number of ids of the tail "argmax" or "topk:K"; InvalidArgumentError for any other."""
    kind, colon, count = tail.partition(":")
    if kind == "argmax" and not colon:
        return kind, 1
    if kind == "topk" and count.isascii() and count.isdecimal() and len(count) < 6 and int(count) > 0:
        return kind, int(count)
    raise refusal("tail", "argmax, or topk:K for K ids per row", tail)


def append_tail(graph: Graph, tail: str) -> None:
    """Append a tail to a graph whose output is logits [R, vocab].

    "argmax" outputs int32 [R]; "topk:K" outputs the ids of the K greatest logits, int32 [R, K], greatest first, and
    their logits.
    """
    op, count = check_tail(tail)
    if count > graph.vocab_size:
        raise InvalidArgumentError(
            f"tail: expected at most {graph.vocab_size} ids, the vocabulary, got {tail}", param="tail"
        )
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
