"""Measures what grammars cost: the vocabulary, compilation, and the mask of each token of typical answers.

    python benchmarks/grammar_masks.py MODEL [--rounds 5]

Times are of the processor in the thread that makes the masks, so that other work on the machine counts less.  "first"
is the compilation with the first mask, "mask" each later one, "accept" the step to the next token.  The answers are
those below, in the tokens that the model's tokenizer splits them into.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from penstock.llm.llm import LLM
from penstock.text.grammar.compiler import GrammarCompiler
from penstock.text.grammar.source import GrammarSource

_TEXT = "The water rises behind the gate, and the keeper opens the penstock: 3 turns, no more. Then it falls again."
_PERSON = {
    "type": "object", "additionalProperties": False, "required": ["name", "age", "email", "address", "tags"],
    "properties": {
        "name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"}, "born": {"type": "string", "format": "date"},
        "address": {
            "type": "object", "additionalProperties": False, "required": ["street", "city"],
            "properties": {"street": {"type": "string", "maxLength": 60}, "city": {"type": "string"}},
        },
        "tags": {"type": "array", "items": {"enum": ["new", "vip", "blocked", "employee"]}, "maxItems": 4},
    },
}  # fmt: skip
_NODE = {
    "$defs": {"node": {
        "type": "object", "required": ["value", "children"], "additionalProperties": False,
        "properties": {"value": {"type": "number"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    }},
    "$ref": "#/$defs/node",
}  # fmt: skip
_ANY = {"title": _TEXT, "list": [1, 2.5, None, True, {"a": "ä日本"}], "nested": {"b": {"c": [[], {}, ""]}}}
CASES: dict[str, tuple[str, str, str]] = {
    "person": ("json_schema", json.dumps(_PERSON), json.dumps({
        "name": "Ada Lovelace", "age": 36, "email": "ada@example.com", "born": "1815-12-10",
        "address": {"street": "12 St James's Square", "city": "London"}, "tags": ["vip", "new"],
    })),
    "tree": ("json_schema", json.dumps(_NODE), json.dumps({"value": 1.5, "children": [
        {"value": -2, "children": []}, {"value": 3e4, "children": [{"value": 7, "children": []}]},
    ]})),
    "bounded text": ("json_schema", json.dumps({"type": "string", "maxLength": 400}), json.dumps(_TEXT * 3)),
    "any object": ("json_object", '{"type": "object"}', json.dumps(_ANY, ensure_ascii=False)),
    "regex": ("regex", r"(\d{3}-){2}\d{4}( x\d{1,5})?", "555-123-4567 x89"),
    "choice": ("choice", json.dumps(["positive", "negative", "neutral"]), "neutral"),
    "arithmetic": (
        "grammar",
        'root ::= sum\nsum ::= term (("+" | "-") term)*\nterm ::= atom (("*" | "/") atom)*\n'
        'atom ::= [0-9]+ | "(" sum ")"\n',
        "(12+34)*(5-67/(8+9))-10*(11+(12-13)*14)",
    ),
}  # fmt: skip


def row_of(name: str, values: list[float]) -> str:
    """Return the line of a table; ``values`` are in seconds."""
    us = np.array(values or [0.0]) * 1e6
    mean, middle, high, most = us.mean(), *np.percentile(us, [50, 99]), us.max()
    return f"{name:<22}{len(us):>7}{mean:>9.1f}{middle:>9.1f}{high:>9.1f}{most:>10.1f}"


def timed(call: object) -> float:
    """Return how long a call kept the processor."""
    start = time.thread_time()
    call()  # type: ignore[operator]
    return time.thread_time() - start


def measure(llm: LLM, compiler: GrammarCompiler, name: str, rounds: int) -> dict[str, list[float]]:
    """Return the times of one case, in seconds."""
    field, text, answer = CASES[name]
    source = GrammarSource(field, text)
    tokens = llm.tokenizer.encode(answer, add_special_tokens=False)
    times: dict[str, list[float]] = {"first": [], "mask": [], "accept": []}
    for _ in range(rounds):
        times["first"].append(timed(lambda: compiler._compile(source)))
        matcher = compiler.compile(source).matcher()
        for token in tokens:
            allowed = matcher.mask[token // 32] >> (token % 32) & 1
            if not allowed:
                raise SystemExit(f"{name}: the answer is not allowed at {llm.tokenizer.decode([token])!r}")
            times["accept"].append(timed(lambda: matcher.accept([token])))  # noqa: B023
            if not matcher.has_mask:
                times["mask"].append(timed(lambda: matcher.mask))  # noqa: B023
    return times


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=CASES)
    args = parser.parse_args()
    with LLM(args.model) as llm:
        compiler = llm._grammars
        own = timed(lambda: llm.tokenizer.vocabulary())
        wall = time.perf_counter()
        both = timed(lambda: compiler._vocabulary)
        wall = time.perf_counter() - wall
        print(f"vocabulary of {llm.info.vocab_size}: {both:.2f} s ({wall:.2f} s of time), of which bytes {own:.2f} s")
        print(f"{'microseconds':<22}{'count':>7}{'mean':>9}{'p50':>9}{'p99':>9}{'max':>10}")
        masks, accepts = [], []
        for name in [args.only] if args.only else CASES:
            times = measure(llm, compiler, name, args.rounds)
            print(row_of(f"{name}, first", times["first"]))
            print(row_of(f"{name}, mask", times["mask"]))
            masks += times["mask"]
            accepts += times["accept"]
        print(row_of("all, mask", masks))
        print(row_of("all, accept", accepts))


if __name__ == "__main__":
    main()
