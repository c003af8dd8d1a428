"""Asks a real, published chat model for answers with grammars, and checks them.

    python -m benchmarks.real.grammars MODEL.gguf [--count 200] [--free 16] [--threads 2]

First ``--count`` different JSON schemas are answered at temperature 1, and jsonschema validates the answers.  Then the
same prompts are answered without a grammar, greedily and at temperature 1, and again with grammars that allow these
answers: any text, a choice between the answer and something else, and the schema where it allows the answer.  The
texts must be equal.  The exit status is 1 if an answer is invalid or cut, or if a text differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import jsonschema

from penstock.engine.params import SamplingParams
from penstock.errors import InternalError, PenstockError
from penstock.llm.llm import LLM
from penstock.runtime.program import ProgramLimits
from penstock.text.grammar.source import GrammarSource

FREE_TOKENS = 32
MASKED_TOKENS = 4 * FREE_TOKENS
"""A drawn answer of the same text may have more tokens: a mask leaves out those that are no part of the text."""
ANSWER_TOKENS = 400
_TOPICS = ["a ship", "a recipe", "a planet", "a customer", "a train ride", "a book", "a city", "a bird", "an invoice"]
_NAMES = ["name", "title", "kind", "city", "price", "count", "born", "active", "tags", "size", "id", "note", "größe"]
_PATTERNS = ["^[A-Z]{2}-[0-9]{3}$", "^[a-z]{2,9}(-[a-z]{2,9})?$", "^#[0-9a-f]{6}$"]
# A small model answers these as it is asked, without a grammar, too.
_SIMPLE: list[dict[str, Any]] = [
    {"type": "object", "properties": {name: {"type": kind} for name, kind in fields.items()}, "required": [*fields]}
    for fields in ({"name": "string", "size": "integer"}, {"title": "string"}, {"kind": "string", "tags": "array"})
]
_PLAIN = " Answer with the JSON object only, without a code block."
Schema = dict[str, Any]


def random_schema(rng: random.Random, depth: int = 2) -> Schema:
    """Return a schema whose answers are short."""
    kind = rng.choice(["text", "pattern", "integer", "number", "boolean", "enum", "format"] + ["array", "any"] * depth)
    match kind:
        case "text":
            return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(4, 24)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(_PATTERNS)}
        case "integer":
            low = rng.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(2000)}
        case "number":
            return {"type": "number", "minimum": 0, "exclusiveMaximum": rng.randrange(1, 100), "multipleOf": 0.01}
        case "boolean":
            return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}
        case "enum":
            return {"enum": rng.sample(["red", "green", "dark blue", 7, None, "日本", 'a "b"'], 4)}
        case "format":
            return {"type": "string", "format": rng.choice(["date", "time", "date-time", "uuid", "ipv4"])}
        case "array":
            low = rng.randrange(2)
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randrange(3)}
    if rng.random() < 0.5:
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    return random_object(rng, depth - 1)


def random_object(rng: random.Random, depth: int = 2) -> Schema:
    """Return a schema of an object of one to four properties."""
    names = rng.sample(_NAMES, rng.randrange(1, 5))
    return {
        "type": "object", "properties": {name: random_schema(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.8], "additionalProperties": False,
    }  # fmt: skip


def prompt_of(llm: LLM, schema: Schema, topic: str, more: str = "") -> list[int]:
    """Return a chat that asks for an object."""
    text = f"Describe {topic} as JSON. Schema: {json.dumps(schema, ensure_ascii=False, separators=(',', ':'))}{more}"
    return llm.chat_prompt([{"role": "user", "content": text}])


def answers_of(llm: LLM, prompts: list[list[int]], params: Iterable[SamplingParams]) -> list[Any]:
    """Return the results in the order of the prompts."""
    outcomes = dict(llm.generate_each(list(zip(prompts, params, strict=True))))
    return [outcomes[index] for index in range(len(prompts))]


def _exact(text: str) -> Any:
    """Return JSON whose fractions are exact, because 0.56 / 0.01 in floating point is not an integer."""

    def number(text: str) -> int | Decimal:
        exact = Decimal(text)
        return int(exact) if exact == exact.to_integral_value() else exact

    return json.loads(text, parse_float=number)


def fault_of(schema: Schema, outcome: Any) -> str:
    """Return what is wrong with an answer; "" if nothing is."""
    if isinstance(outcome, PenstockError):
        return f"failed: {outcome}"
    if outcome.finish_reason != "stop":
        return f"ends with {outcome.finish_reason}: {outcome.text!r}"
    try:
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        validator = jsonschema.Draft202012Validator(_exact(json.dumps(schema)), format_checker=checker)
        validator.validate(_exact(outcome.text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{str(error).splitlines()[0]}: {outcome.text!r}"
    return ""


def allows(llm: LLM, source: GrammarSource, tokens: list[int]) -> bool:
    """Return True if a grammar allows these tokens."""
    try:
        llm._grammars.compile(source).matcher().accept(tokens)
    except InternalError:
        return False
    return True


def check_schemas(llm: LLM, schemas: list[Schema], prompts: list[list[int]]) -> int:
    """Answer the schemas, print what is wrong, and return how many are."""
    start = time.perf_counter()
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=ANSWER_TOKENS, json_schema=schema)
        for seed, schema in enumerate(schemas)
    ]
    outcomes = answers_of(llm, prompts, params)
    faults = {index: fault for index, outcome in enumerate(outcomes) if (fault := fault_of(schemas[index], outcome))}
    for index, fault in faults.items():
        print(f"schema {index}: {fault}\n  {json.dumps(schemas[index], ensure_ascii=False)}")
    num_tokens = sum(len(outcome.token_ids) for outcome in outcomes if not isinstance(outcome, PenstockError))
    print(
        f"schemas: {len(schemas) - len(faults)} of {len(schemas)} answered validly at temperature 1; "
        f"{num_tokens} tokens in {time.perf_counter() - start:.0f} s",
        flush=True,
    )
    return len(faults)


def check_equal(llm: LLM, schemas: list[Schema], prompts: list[list[int]], temperature: float) -> int:
    """Answer without a grammar, and with grammars that allow the answer.  Return how many texts differ."""

    def params(index: int, **grammar: Any) -> SamplingParams:
        limit = MASKED_TOKENS if grammar else FREE_TOKENS
        return SamplingParams(temperature=temperature, seed=index, max_tokens=limit, **grammar)

    free = answers_of(llm, prompts, [params(index) for index in range(len(prompts))])
    cases: list[tuple[int, str, dict[str, Any]]] = []
    for index, answer in enumerate(free):
        cases.append((index, "any text", {"regex": r"(?s:.*)"}))
        cases.append((index, "a choice", {"choice": [answer.text, "no answer"]}))
        schema = json.dumps(schemas[index])
        if allows(llm, GrammarSource("json_schema", schema), answer.token_ids):
            cases.append((index, "its schema", {"json_schema": schema}))
    found = answers_of(llm, [prompts[i] for i, _, _ in cases], [params(i, **grammar) for i, _, grammar in cases])
    different = 0
    for (index, name, _), answer in zip(cases, found, strict=True):
        expected = free[index].text
        if (
            isinstance(answer, PenstockError)
            or not answer.text.startswith(expected)
            or (free[index].finish_reason == "stop" and answer.text != expected)
        ):
            different += 1
            text = answer if isinstance(answer, PenstockError) else answer.text
            print(f"prompt {index}, {name}: {text!r} instead of {expected!r}")
    num_schemas = sum(name == "its schema" for _, name, _ in cases)
    print(
        f"temperature {temperature}: {len(cases) - different} of {len(cases)} texts are those without a grammar, "
        f"{num_schemas} of them by their schema"
    )
    return different


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--free", type=int, default=16, help="prompts of each kind without a grammar, too")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-requests", type=int, default=32)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    schemas = [random_object(rng) for _ in range(args.count)]
    limits = ProgramLimits(context_len=1536, max_requests=args.max_requests)
    with LLM(args.model, threads=args.threads, limits=limits) as llm:
        prompts = [prompt_of(llm, schema, _TOPICS[index % len(_TOPICS)]) for index, schema in enumerate(schemas)]
        wrong = check_schemas(llm, schemas, prompts)
        schemas, prompts = schemas[: args.free], prompts[: args.free]
        simple = list(
            itertools.islice(itertools.cycle(_SIMPLE), args.free)
        )  # answered as asked, also without a grammar
        schemas += simple
        prompts += [
            prompt_of(llm, schema, _TOPICS[index % len(_TOPICS)], _PLAIN) for index, schema in enumerate(simple)
        ]
        for temperature in (0.0, 1.0):
            wrong += check_equal(llm, schemas, prompts, temperature)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
