"""Measures what hostile grammars cost, and what other requests wait meanwhile.

    python -m benchmarks.hostile_grammars BUNDLE [--count 400] [--first 0] [--senders 2]

The grammars are drawn from seeds and made to take long, much memory, or a compiler down: deep nesting, explosions, huge
repetitions, recursion, broken texts.  ``--senders`` threads give them to the model, while one client asks again and
again for 16 tokens without a grammar; before and after, senders give it short grammars that are not hostile.  Printed
are the latencies of that client, the ratio of their medians (the goal is below 2), the times of compilations, and the
memory of the process.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from penstock.engine.params import SamplingParams
from penstock.errors import PenstockError
from penstock.llm.llm import LLM
from penstock.text.grammar.source import GrammarSource

__all__ = ["ask_hostile", "hostile_grammar"]

_LETTERS = "abcxyz019_-. /\\\"'[](){}|*+?^$&~<>:;,#%\n\t\0\x7fäß日本\u2028\ufeff\U0001f600"


def _size(rng: random.Random, most: int) -> int:
    """Most are small, a few reach ``most``."""
    return max(1, round(most ** rng.random()))


def _text(rng: random.Random, most: int = 12) -> str:
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randrange(most)))


def _regex(rng: random.Random, depth: int = 4) -> str:
    if depth == 0:
        return rng.choice(["a", "b", ".", "[a-z]", r"\d", r"\w", r"\p{L}", "[^x]", "é", "(?i:k)", r"\x{1f600}"])
    part = _regex(rng, depth - 1)
    match rng.randrange(7):
        case 0:
            return f"({part}){rng.choice('*+?')}"
        case 1:
            low = _size(rng, 3000)
            return f"({part}){{{low},{rng.choice(['', str(low), str(low + _size(rng, 3000))])}}}"
        case 2:
            return f"({part}|{_regex(rng, depth - 1)})"
        case 3:
            return f"({part}{_regex(rng, depth - 1)})"
        case 4:
            return f".*{part}.{{{_size(rng, 60)}}}"
        case 5:
            return "|".join(f"{part}{index}" for index in range(_size(rng, 300)))
    return f"({part})" * _size(rng, 40)


def _nested_regex(rng: random.Random) -> str:
    count = _size(rng, 20_000)
    opening, closing = rng.choice([("(", ")"), ("(?:", ")*"), ("(a|", ")"), ("(", "){1,9}"), ("[", "]")])
    return opening * count + "a" + closing * count


def _broken(rng: random.Random, text: str) -> str:
    """Return a text with a few characters more, fewer, or others."""
    chars = list(text[:2000])
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(chars) + 1)
        chars[at : at + rng.randrange(3)] = _text(rng, 4)
    return "".join(chars) or "x"


def _leaf(rng: random.Random) -> Any:
    match rng.randrange(9):
        case 0:
            return {"type": "string", "pattern": _regex(rng, rng.randrange(4))}
        case 1:
            return {"type": "string", "maxLength": _size(rng, 10**7), "minLength": _size(rng, 10**4)}
        case 2:
            return {"type": "array", "minItems": _size(rng, 10**5), "items": rng.choice([True, {"type": "null"}])}
        case 3:
            return {"type": rng.choice(["number", "integer"]), "minimum": rng.randrange(-(10**30), 10**30)}
        case 4:
            return {"type": "number", "multipleOf": rng.random() ** 9, "maximum": _size(rng, 10**15)}
        case 5:
            return {"enum": [_text(rng, 40) for _ in range(_size(rng, 2000))]}
        case 6:
            return {"format": rng.choice(["date", "uri", "email", "ipv6", "hostname", "uuid", _text(rng)])}
        case 7:
            return {"const": json.loads("[" * (depth := _size(rng, 60)) + "]" * depth)}
    return rng.choice([True, False, {}, {"type": "object"}, {"type": "string"}, None, 5, [], {"type": _text(rng)}])


def _schema(rng: random.Random, depth: int = 3) -> Any:
    if depth == 0:
        return _leaf(rng)
    count = _size(rng, 400 if depth == 1 else 12)
    match rng.randrange(10):
        case 0:
            return {rng.choice(["anyOf", "oneOf", "allOf"]): [_schema(rng, depth - 1) for _ in range(count)]}
        case 1:
            names = [_text(rng) or "x" for _ in range(count)]
            return {"type": "object", "properties": {n: _schema(rng, depth - 1) for n in names}, "required": names[:9]}
        case 2:
            patterns = {f"^{_regex(rng, 1)}{index}$": _schema(rng, depth - 1) for index in range(count)}
            return {"patternProperties": patterns, "additionalProperties": rng.choice([True, False])}
        case 3:
            return {"type": "array", "prefixItems": [_schema(rng, depth - 1) for _ in range(count)], "items": False}
        case 4:
            shared = {f"p{index}": {"type": "string"} for index in range(count)}
            return {"allOf": [{"properties": shared, "minProperties": index} for index in range(_size(rng, 60))]}
        case 5:  # 2 ** count alternatives
            halves = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(count)}
            return {"$defs": {**halves, f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}
        case 6:
            ref = rng.choice(["#", "#/$defs/a", "#/allOf/0", "#/$defs/" + "a" * 500, "https://example.com/x"])
            return {"$defs": {"a": {rng.choice(["allOf", "anyOf"]): [{"$ref": ref}, {"$ref": "#"}]}}, "$ref": ref}
        case 7:
            both = [{"anyOf": [{"const": i}, _schema(rng, depth - 1)]} for i in range(_size(rng, 14))]
            return {"allOf": both}
        case 8:
            return {"type": "object", "minProperties": _size(rng, 500), "maxProperties": _size(rng, 10**6)}
    return {_text(rng): _schema(rng, depth - 1), "not": _schema(rng, depth - 1)}


def _nested_schema(rng: random.Random) -> str:
    opening, closing = rng.choice([
        ('{"items":', "}"), ('{"anyOf":[{"type":"null"},', "]}"), ('{"allOf":[', "]}"), ('{"properties":{"a":', "}}"),
        ('{"oneOf":[{"type":"null"},', "]}"), ("[", "]"), ('{"not":', "}"),
    ])  # fmt: skip
    depth = _size(rng, 5000)
    return opening * depth + "{}" + closing * depth


def _many_properties(rng: random.Random) -> str:
    count = _size(rng, 16_000)
    properties = {f"p{index}": rng.choice([True, {}, {"type": "null"}]) for index in range(count)}
    return json.dumps({rng.choice(["properties", "patternProperties", "$defs"]): properties})


def _wide_schema(rng: random.Random) -> str:
    count = _size(rng, 4000)
    parts = [{"properties": {f"p{index}": True}} for index in range(count)]
    return json.dumps({rng.choice(["allOf", "anyOf", "oneOf", "prefixItems"]): parts})


def _rules(rng: random.Random) -> list[str]:
    """Rules of a random grammar without their arrow, of which the first is the start."""
    count = _size(rng, 60)
    names = [f"r{index}" for index in range(count)]

    def item() -> str:
        pair = f"({rng.choice(names)} {rng.choice(names)})"
        part = rng.choice([rng.choice(names), '"a"', '"b"', "[a-z]", '""', pair])
        return part + rng.choice(["", "", "*", "+", "?", f"{{{_size(rng, 5000)},}}", f"{{0,{_size(rng, 10**6)}}}"])

    def body() -> str:
        return " | ".join(" ".join(item() for _ in range(rng.randrange(1, 5))) for _ in range(_size(rng, 30)))

    return [body() for _ in names]


def _gbnf(rng: random.Random) -> str:
    rules = _rules(rng)
    return "root ::= r0\n" + "\n".join(f"r{index} ::= {body}" for index, body in enumerate(rules))


def _lark(rng: random.Random) -> str:
    rules = [body.replace("[a-z]", "/[a-z]+/") for body in _rules(rng)]
    text = "start: r0\n" + "\n".join(f"r{index}: {body}" for index, body in enumerate(rules))
    match rng.randrange(6):
        case 0:
            return f"{text}\n{_text(rng, 30)}"
        case 1:
            regex = _regex(rng).replace("/", "")
            return f"start: r0 T\nr0: T | r0 r0 | r0 T r0\nT: /{regex}/"
        case 2:
            return f"start: %json {json.dumps(_schema(rng))}"
        case 3:
            count = _size(rng, 400)
            chain = "\n".join(f"T{index}: T{index + 1} T{index + 1}" for index in range(count))
            return f"start: T0\n{chain}\nT{count}: /a/"
        case 4:
            one, two, three = (_regex(rng, 2) for _ in range(3))
            return f"start: A | B\nA: /{one}/ & ~/{two}/\nB: ~(/{three}/ | /{one}/) & /{two}/"
    return text


_KINDS: list[Callable[[random.Random], tuple[str, str]]] = [
    lambda rng: ("regex", _regex(rng)),
    lambda rng: ("regex", _nested_regex(rng)),
    lambda rng: ("regex", _broken(rng, _regex(rng, 3))),
    lambda rng: ("regex", f"{_text(rng)}.*{_text(rng)}" + "(.*a)" * _size(rng, 30)),
    lambda rng: ("json_schema", json.dumps(_schema(rng))),
    lambda rng: ("json_schema", json.dumps(_schema(rng, 2), ensure_ascii=False)),
    lambda rng: ("json_schema", _broken(rng, json.dumps(_schema(rng, 2)))),
    lambda rng: ("json_schema", _nested_schema(rng)),
    lambda rng: ("json_schema", _many_properties(rng)),
    lambda rng: ("json_schema", _wide_schema(rng)),
    lambda rng: ("grammar", _gbnf(rng)),
    lambda rng: ("grammar", _lark(rng)),
    lambda rng: ("grammar", _lark(rng)),
    lambda rng: ("grammar", _broken(rng, _gbnf(rng))),
    lambda rng: ("grammar", _broken(rng, _lark(rng))),
    lambda rng: ("choice", json.dumps([_text(rng, 200) or "x" for _ in range(_size(rng, 1000))])),
]


def hostile_grammar(seed: int) -> GrammarSource:
    """Return a grammar as a request may have it, whose fields are not checked."""
    rng = random.Random(seed)
    field, text = _KINDS[seed % len(_KINDS)](rng)
    return GrammarSource(field, text)


def ask_hostile(llm: LLM, seed: int, max_tokens: int = 8) -> str:
    """Ask for an answer in a hostile grammar, and return how the request ended: a finish reason, or an error's code."""
    source = hostile_grammar(seed)
    value = json.loads(source.text) if source.field == "choice" else source.text
    try:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, **{source.field: value})
        compiling = llm.compile_grammar(params)
        _grammar = compiling.result() if compiling is not None else None  # kept until it is found again
        return llm.generate([5, 6, 7], params).finish_reason
    except PenstockError as error:
        return error.code or type(error).__name__


def _latencies(llm: LLM, is_over: Callable[[], bool]) -> Iterator[float]:
    """Yield how long requests without a grammar take, until ``is_over``."""
    plain = SamplingParams(max_tokens=16, ignore_eos=True)
    while not is_over():
        start = time.perf_counter()
        llm.generate([5, 6, 7, 8], plain)
        yield time.perf_counter() - start


def _beside(
    llm: LLM, ask: Callable[[int], str], seeds: range, senders: int
) -> tuple[list[float], list[float], Counter[str]]:
    """Return the latencies of other requests while ``ask`` runs with each seed, the times of that, and how it ended."""
    waiting, lock = iter(seeds), threading.Lock()
    took: list[float] = []
    ends: Counter[str] = Counter()

    def send() -> None:
        while True:
            with lock:
                seed = next(waiting, None)
            if seed is None:
                return
            start = time.perf_counter()
            end = ask(seed)
            with lock:
                took.append(time.perf_counter() - start)
                ends[end] += 1

    threads = [threading.Thread(target=send) for _ in range(senders)]
    for thread in threads:
        thread.start()
    latencies = list(_latencies(llm, lambda: not any(thread.is_alive() for thread in threads)))
    return latencies, took, ends


def _row(name: str, values: list[float]) -> str:
    ms = sorted(value * 1e3 for value in values)
    return f"{name:<28}{len(ms):>7}{statistics.median(ms):>9.1f}{ms[int(len(ms) * 0.99)]:>10.1f}{ms[-1]:>10.1f}"


def main() -> None:
    """Print latencies and memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--senders", type=int, default=2)
    args = parser.parse_args()
    with LLM(args.bundle) as llm:

        def harmless(seed: int) -> str:
            return llm.generate([5, 6, 7], SamplingParams(max_tokens=8, regex=f"[a-z]{{8}}|{seed}")).finish_reason

        seeds = range(args.first, args.first + args.count)
        before, _, _ = _beside(llm, harmless, range(200), args.senders)
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        during, took, ends = _beside(llm, lambda seed: ask_hostile(llm, seed), seeds, args.senders)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        after, _, _ = _beside(llm, harmless, range(200, 400), args.senders)
    print(f"{'milliseconds':<28}{'count':>7}{'p50':>9}{'p99':>10}{'max':>10}")
    print(_row("others, harmless grammars", before + after))
    print(_row("others, hostile grammars", during))
    print(_row("hostile requests", took))
    print(f"others' median: {statistics.median(during) / statistics.median(before + after):.2f} times as long")
    print(f"memory: {held} MiB, at most {peak} MiB with hostile grammars; ends: {dict(ends)}")


if __name__ == "__main__":
    main()
