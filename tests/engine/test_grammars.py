"""Answers follow their grammar, whatever else happens to their request, and other requests never notice."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest

from penstock import LLM
from penstock.engine.options import EngineOptions, RequestOptions
from penstock.engine.params import ResolvedSampling, SamplingParams
from penstock.engine.request import BegunAnswer
from penstock.errors import InternalError, InvalidArgumentError, UnsupportedError
from penstock.text.grammar import compiler as grammar_compiler
from penstock.text.grammar import matcher as grammar_matcher
from penstock.text.grammar.compiler import Grammar, GrammarCompiler
from penstock.text.grammar.matcher import GrammarMatcher
from penstock.text.grammar.source import GRAMMAR_FIELDS, GrammarSource
from tests.support.command import DEMO
from tests.support.errors import raises
from tests.support.fake_model import FILES
from tests.support.schemas import SCHEMAS, random_answer, random_schema
from tests.support.tokenizer_kinds import KINDS, segment_of

PROMPT = "the cat sat"
HOT = {"temperature": 1.0, "seed": 5, "max_tokens": 300}
PAIRS = {
    "json_schema": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]},
    "json_object": True,
    "regex": r"(\d{3}-){2}[a-f]{4}",
    "choice": ["yes", "no", "a.b*c/\n"],
    "grammar": 'start: "<" item{2,5} ">"\nitem: /[a-z]{1,4}/ ","\n',
}


@pytest.fixture(scope="module")
def demo():
    with LLM(DEMO) as made:
        yield made


def follows(schema: dict, text: str) -> None:
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(json.loads(text))


def check(llm: LLM, schema: dict, seed: int) -> None:
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=200, json_schema=schema)
    choice = llm.generate("def add(a, b):", params)
    assert choice.finish_reason in ("stop", "length")
    if choice.finish_reason == "stop":
        follows(schema, choice.text)
    else:
        assert len(choice.token_ids) == 200


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_follow_their_schema(demo, name):
    """Random weights' temperature 1; jsonschema decides."""
    check(demo, SCHEMAS[name], 1)


@pytest.mark.long
def test_answers_follow_random_schemas(demo):
    rng = random.Random(3)
    for seed in range(100):
        check(demo, random_schema(rng), seed)


def allows(llm: LLM, grammar: Grammar, text: str) -> bool:
    """Whether a grammar allows a whole answer."""
    matcher = grammar.matcher()
    try:
        if matcher.accept(llm.tokenizer.encode(text, add_special_tokens=False)):
            return True
    except InternalError:
        return False
    allowed = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
    return bool(allowed[llm.generation.eos_token_ids[0]])


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.long)])
def test_grammars_allow_what_their_schemas_do(demo, count):
    """Four answers to each random schema, valid or not, beside jsonschema."""
    rng, found = random.Random(count), Counter()
    for _ in range(count):
        schema = random_schema(rng)
        grammar = demo._grammars.compile(GrammarSource("json_schema", json.dumps(schema)))
        validator = jsonschema.Draft202012Validator(schema)
        for answer in (random_answer(schema, rng) for _ in range(4)):
            text = json.dumps(answer, ensure_ascii=False)  # a grammar has one spelling of a string
            is_valid = validator.is_valid(answer)
            assert allows(demo, grammar, text) == is_valid, (schema, text)
            found[is_valid] += 1
    assert min(found[True], found[False]) > count


def test_every_kind_of_grammar_holds(demo):
    patterns = {"regex": PAIRS["regex"], "choice": r"yes|no|a\.b\*c/\n", "grammar": "<([a-z]{1,4},){2,5}>"}
    for temperature in (0.0, 1.0):
        for name, pattern in patterns.items():
            answer = demo.generate("x", SamplingParams(temperature=temperature, seed=2, **{name: PAIRS[name]}))
            assert answer.finish_reason == "stop"
            assert re.fullmatch(pattern, answer.text), (name, answer.text)
    gbnf = 'root ::= "[" item ("," ws item)* "]"\nitem ::= [0-9] [a-c]?\nws ::= " "?\n'
    answer = demo.generate("x", SamplingParams(temperature=1.0, seed=2, max_tokens=400, grammar=gbnf))
    assert re.fullmatch(r"\[[0-9][a-c]?(, ?[0-9][a-c]?)*\]", answer.text)
    answer = demo.generate("x", SamplingParams(json_object=True, max_tokens=400, temperature=1.0, seed=1))
    assert answer.finish_reason == "length" or isinstance(json.loads(answer.text), dict)


def test_an_answer_ends_with_its_grammar_or_at_its_limit(make_llm):
    llm = make_llm()
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 9}, {"temperature": 0.0}):
        answer = llm.generate(PROMPT, SamplingParams(**HOT | {"regex": "[a-c]{4}"} | more))
        assert (answer.finish_reason, len(answer.text), len(answer.token_ids)) == ("stop", 4, 4)
    answer = llm.generate(PROMPT, SamplingParams(**HOT | {"regex": "[a-c]{4}", "max_tokens": 3}))
    assert (answer.finish_reason, len(answer.text)) == ("length", 3)
    answer = llm.generate(PROMPT, SamplingParams(**HOT | {"regex": "[a-c]{4}", "max_tokens": 4}))
    assert answer.finish_reason == "stop"
    answer = llm.generate(PROMPT, SamplingParams(**HOT | {"regex": "[a-c]+x", "stop": ["b"]}))
    assert (answer.finish_reason, "b" in answer.text) == ("stop", False)


def test_a_model_without_end_tokens_ends_with_its_grammar(make_llm):
    llm = make_llm(files={"tokenizer.json": FILES["tokenizer.json"]}, vocab_size=288)  # whole words of the mask
    assert re.fullmatch("[a-c]{4}", llm.generate(PROMPT, SamplingParams(**HOT, regex="[a-c]{4}")).text)


COMPANY = {
    "chunks": {"max_chunk": 3},
    "no cache": {"options": EngineOptions(prefix_cache=False)},
    "preempted": {"num_pages": 4, "max_requests": 4},
    "windows": {"windows": (0, 40)},
}


@pytest.mark.parametrize("name", COMPANY)
def test_answers_are_the_same_in_any_company(make_llm, name):
    """Pairs of grammars with chunks, prefix cache, preemption, windows, n, log-probabilities and plain neighbours."""
    alone, llm = make_llm(windows=COMPANY[name].get("windows", (0,))), make_llm(**COMPANY[name])
    prompts = [f"{PROMPT} {index} " * (1 + index % 3) for index in range(7)]
    params = []
    for index in range(7):
        own = list(PAIRS.items())[index % 6 : index % 6 + 1]
        more = {"n": 2} if index == 3 else {"logprobs": 2} if index == 4 else {"repetition_penalty": 1.3}
        params.append(SamplingParams(temperature=1.0, seed=index, max_tokens=60, **dict(own), **more))
    expected = [alone.generate(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    found = llm.generate(prompts, params)
    for one, other in zip(expected, found, strict=True):
        assert [c.token_ids for c in one.choices] == [c.token_ids for c in other.choices]
        assert [c.finish_reason for c in one.choices] == [c.finish_reason for c in other.choices]
        assert [c.logprobs for c in one.choices] == [c.logprobs for c in other.choices]
    if name == "preempted":
        assert llm.engine.figures().num_preemptions > 0


def test_an_answer_goes_on_in_another_engine(make_llm):
    llm, other = make_llm(), make_llm()
    params = SamplingParams(**HOT, regex=r"([a-f]{2}-){5}\d")
    whole = llm.generate(PROMPT, params)
    for num in (1, 7, len(whole.token_ids) - 1):
        begun = {0: BegunAnswer(0, whole.token_ids[:num], num)}
        (submit,) = other.prepare(PROMPT, params, RequestOptions(), begun)
        request = submit()
        while other.engine.wait(request, len(request.output_ids)):
            pass
        assert request.output_ids == whole.token_ids
    (submit,) = other.prepare(PROMPT, params, RequestOptions(), {0: BegunAnswer(0, [7], 0)})
    with pytest.raises(InternalError):  # the grammar does not allow the token
        submit()


def test_masks_are_those_of_the_library(make_llm):
    """Beside llguidance's own matcher over the same vocabulary, token by token."""
    import llguidance

    llm = make_llm()
    compiler = llm._grammars
    source = GrammarSource("json_schema", json.dumps(SCHEMAS["of pydantic"]))
    own = compiler.compile(source).matcher()
    theirs = llguidance.LLMatcher(compiler._vocabulary[0], source.lark(), log_level=0)
    rng, is_complete = random.Random(1), False
    while not is_complete:
        expected = np.frombuffer(theirs.compute_bitmask(), np.uint32)
        assert np.array_equal(own.mask, expected)
        allowed = np.flatnonzero(np.unpackbits(own.mask.view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed))
        if token in llm.generation.eos_token_ids:
            continue
        is_complete = own.accept([token])
        assert theirs.consume_token(token)
    assert theirs.is_stopped()


@pytest.fixture
def scarce(make_llm, monkeypatch):
    """Compiles a grammar whose lexer is soon full; ``ends`` says after how many tokens an answer of it fails, if so."""
    monkeypatch.setitem(grammar_compiler._LIMITS, "max_lexer_states", 1000)
    llm = make_llm()
    source = GrammarSource("regex", "[a-z]*[a-m][a-z]{30}")
    letters = [llm.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcdefghijklmnopqrstuvwxyz"]
    return SimpleNamespace(compiler=llm._grammars, source=source, letters=letters)


def ends(grammar, answer, max_ahead=0):
    """Return how many tokens an answer has when its grammar refuses to go on, and its masks."""
    matcher, masks = grammar.matcher(), []
    for token in answer:
        try:
            matcher.accept([token])
            if not matcher.has_mask:
                matcher.look_ahead(max_ahead)
            masks.append(matcher.mask.tobytes())
        except InvalidArgumentError as error:
            if (error.param, error.code) != ("regex", "grammar_too_complex"):
                raise
            return len(masks), masks
    return None, masks


def test_answers_do_not_use_up_the_states_of_each_other(scarce):
    """Those of one grammar share a lexer, whose number of states is limited.  Some need too many, with or without."""
    rng = random.Random(5)
    answers = [[rng.choice(scarce.letters) for _ in range(60 + 500 * (i % 4 == 3))] for i in range(24)]
    shared, ended = scarce.compiler.compile(scarce.source), []
    for answer in answers:
        scarce.compiler._forget(scarce.source)
        alone = ends(scarce.compiler.compile(scarce.source), answer)
        assert ends(shared, answer) == alone
        ended.append(alone[0])
    assert None in ended
    assert any(ended)


def test_a_full_lexer_is_compiled_once_for_an_answer(scarce, monkeypatch):
    """Masks are made there, so others would wait.  A request that comes later has it compiled elsewhere."""
    rng = random.Random(5)
    shared, calls = scarce.compiler.compile(scarce.source), []
    compile_again = shared._compile
    monkeypatch.setattr(shared, "_compile", lambda: calls.append(1) or compile_again())
    long = [rng.choice(scarce.letters) for _ in range(2000)]
    assert ends(shared, long)[0] is not None
    assert not calls  # the only answer
    assert scarce.compiler.compile(scarce.source) is not shared
    for number in (1, 2):
        assert ends(shared, long)[0] is not None
        assert len(calls) == number


def test_a_special_token_of_a_grammar_allows_no_other(make_llm):
    llm = make_llm()
    _, specials = llm.tokenizer.vocabulary()
    token = next(one for one in specials if one not in llm.generation.eos_token_ids)
    matcher = llm._grammars.compile(GrammarSource("grammar", f"start: <[{token}]> /a/")).matcher()
    assert np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")).tolist() == [token]


def test_gbnf_may_name_tokens(make_llm):
    """As in llama.cpp, also in rules that would otherwise be terminals; in strings and classes they are text."""
    llm = make_llm()
    a, b = (llm.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ab")
    grammar = f'root ::= x !<[{b}]>\nx ::= "<[" [<[] <[{a}]>? <[{b}]>'
    compiled = llm._grammars.compile(GrammarSource("grammar", grammar))
    for text, follows in (("<[<ab", True), ("<[[b", True), ("<[[a", False)):
        matcher = compiled.matcher()
        matcher.accept(llm.tokenizer.encode(text, add_special_tokens=False))
        allowed = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
        assert (allowed[a], allowed[b]) == ((1, 0) if follows else (0, 1))


def test_escapes_of_gbnf_are_characters(make_llm):
    grammar = 'root ::= "\\u0041\\u00e9" [\\u0062] "\\\\u0041"'
    assert make_llm().generate(PROMPT, SamplingParams(**HOT, grammar=grammar)).text == "Aéb\\u0041"
    grammar = 'root ::= [\\-] "a\\-." # .\n'
    assert make_llm().generate(PROMPT, SamplingParams(**HOT, grammar=grammar)).text == "-a-."


def test_the_dot_of_gbnf_is_any_character(make_llm):
    """Also a line break, as in llama.cpp; that of Lark and of regular expressions is not."""
    compiler, (line_break,) = make_llm()._grammars, make_llm().tokenizer.encode("\n", add_special_tokens=False)
    for source, expected in (
        (GrammarSource("grammar", "root ::= ."), 1),
        (GrammarSource("grammar", "start: /./"), 0),
        (GrammarSource("regex", "."), 0),
    ):
        mask = compiler.compile(source).matcher().mask
        assert np.unpackbits(mask.view(np.uint8), bitorder="little")[line_break] == expected


def test_a_failing_grammar_ends_only_its_request(make_llm, monkeypatch):
    llm = make_llm()
    plain = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    expected = llm.generate(PROMPT, plain).token_ids
    accept, calls = GrammarMatcher.accept, []

    def fails(self, token):
        calls.append(token)
        if len(calls) == 3:
            raise InvalidArgumentError("regex: too complex", param="regex", code="grammar_too_complex")
        return accept(self, token)

    monkeypatch.setattr(GrammarMatcher, "accept", fails)
    items = [(PROMPT, plain), (PROMPT, SamplingParams(**HOT, regex="[a-z]{30}")), (PROMPT, plain)]
    outcomes = dict(llm.generate_each(items))
    assert isinstance(outcomes[1], InvalidArgumentError)
    assert (outcomes[1].param, outcomes[1].code) == ("regex", "grammar_too_complex")
    assert outcomes[0].token_ids == outcomes[2].token_ids == expected


def test_masks_are_made_while_the_step_runs_none_in_vain(make_llm, monkeypatch):
    """The first comes with the grammar; the last token of an answer needs none after it."""
    made, fill = [], grammar_matcher.fill_mask
    monkeypatch.setattr(
        grammar_matcher, "fill_mask", lambda *a: made.append(threading.current_thread().name) or fill(*a)
    )
    llm = make_llm()
    for limit, count in ((9, 3), (4, 3), (3, 2), (1, 0)):
        made.clear()
        llm.generate(PROMPT, SamplingParams(**HOT | {"regex": "[a-c]{4}", "max_tokens": limit}))
        assert len(made) == count
        assert all(name.startswith("penstock-masks") for name in made)


FORCED = r"[ab]{2}: the only text that may come[cd]{3}!"


@pytest.mark.parametrize(("max_tokens", "num_tokens", "num_steps"), [(5, 5, 4), (20, 20, 4), (100, 35, 7)])
def test_forced_tokens_are_computed_as_one_chunk(make_llm, max_tokens, num_tokens, num_steps, monkeypatch):
    """With log-probabilities, or where something else may forbid a token, they are computed one by one."""
    monkeypatch.setattr(grammar_matcher, "_AHEAD_S", 60.0)
    params = SamplingParams(**HOT | {"max_tokens": max_tokens}, regex=FORCED)
    llm, items = make_llm(), [(PROMPT, params), (PROMPT, replace(params, n=2)), ("a dog", params)]
    found, steps = [], []
    for more in ({"logprobs": 0}, {"allowed_token_ids": [*range(llm.info.vocab_size)]}, {}):
        before, tokens = llm.engine.num_steps, llm.engine.num_output_tokens
        results = [llm.generate(prompt, replace(own, **more)) for prompt, own in items]
        found.append([[(c.token_ids, c.text, c.finish_reason) for c in result.choices] for result in results])
        steps.append(llm.engine.num_steps - before)
        assert llm.engine.num_output_tokens - tokens == sum(len(ids) for own in found[-1] for ids, _, _ in own)
        llm.engine.check_integrity()
    assert found[0] == found[1] == found[2]
    assert steps == [3 * num_tokens, 3 * num_tokens, 3 * num_steps]
    assert all(choice[2] == ("stop" if max_tokens == 100 else "length") for own in found[2] for choice in own)


def test_an_end_within_forced_tokens_holds(make_llm):
    llm, params = make_llm(), SamplingParams(**HOT, regex=FORCED)
    whole = llm.generate(PROMPT, params).text
    for stop in ("only", "text t", "me"):
        assert llm.generate(PROMPT, replace(params, stop=[stop])).text == whole[: whole.index(stop)]
    streamed = "".join(delta.text for delta in llm.stream(PROMPT, params))
    assert streamed == whole


def test_an_error_behind_forced_tokens_comes_with_them(make_llm, monkeypatch):
    """The answer ends where it does if its tokens are taken one by one."""
    llm, fill, left = make_llm(), grammar_matcher.fill_mask, [0]
    grammar = llm._grammars.compile(GrammarSource("regex", FORCED))
    answer = llm.tokenizer.encode("ab: the only text that may comecdc!", add_special_tokens=False)

    def fails(*args):
        left[0] -= 1
        if left[0] < 0:
            raise InvalidArgumentError("regex: too complex", param="regex", code="grammar_too_complex")
        return fill(*args)

    monkeypatch.setattr(grammar_matcher, "fill_mask", fails)
    for num_masks in range(len(answer) + 1):
        left[0] = num_masks
        expected = ends(grammar, answer)
        left[0] = num_masks
        assert ends(grammar, answer, 7) == expected
        assert (expected[0] is None) == (num_masks >= len(answer) - 1)


def test_tokens_before_an_error_are_streamed(make_llm, monkeypatch):
    llm, fill, masks = make_llm(), grammar_matcher.fill_mask, []

    def fails(*args):
        masks.append(None)
        if len(masks) > 10:
            raise InvalidArgumentError("regex: too complex", param="regex", code="grammar_too_complex")
        return fill(*args)

    monkeypatch.setattr(grammar_matcher, "fill_mask", fails)
    seen = ""
    with raises(InvalidArgumentError, param="regex", code="grammar_too_complex"):
        for delta in llm.stream(PROMPT, SamplingParams(**HOT, regex=FORCED)):
            seen += delta.text
    assert ": the on" in seen


def test_a_mask_that_fails_ends_only_its_request(make_llm, monkeypatch):
    llm = make_llm()
    plain = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    grammar = SamplingParams(**HOT, regex="[a-z]{30}")
    expected = [llm.generate(PROMPT, params).token_ids for params in (plain, grammar)]

    def fails(matcher, field, num_words):
        raise InvalidArgumentError("json_schema: too complex", param=field, code="grammar_too_complex")

    schema = SamplingParams(**HOT, json_schema=PAIRS["json_schema"])
    llm.compile_grammar(schema).result(60)
    fill = grammar_matcher.fill_mask
    monkeypatch.setattr(
        grammar_matcher, "fill_mask", lambda m, field, n: (fails if field == "json_schema" else fill)(m, field, n)
    )
    outcomes = dict(llm.generate_each([(PROMPT, plain), (PROMPT, schema), (PROMPT, grammar)]))
    assert (outcomes[1].param, outcomes[1].code) == ("json_schema", "grammar_too_complex")
    assert [outcomes[0].token_ids, outcomes[2].token_ids] == expected
    llm.engine.check_integrity()
    assert not llm.engine.scheduler.has_work


def test_a_grammar_that_no_token_continues_is_refused(make_llm):
    """The library's own mask would have allowed the end of the answer."""
    with raises(InvalidArgumentError, param="regex", code="grammar_dead_end"):
        make_llm(vocab_size=40).generate([5, 6], SamplingParams(regex="[x-z]"))


REFUSED = [
    ({"json_schema": {"not": {"type": "string"}}}, UnsupportedError, "json_schema", "not"),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, UnsupportedError, "json_schema", "uniqueItems"),
    ({"json_schema": {"type": "text"}}, InvalidArgumentError, "json_schema", "text"),
    ({"json_schema": {"$ref": "https://example.com/x"}}, InvalidArgumentError, "json_schema", "example.com"),
    ({"json_schema": {"type": "string", "pattern": "(?=a)"}}, UnsupportedError, "json_schema", "look-around"),
    ({"json_schema": {"x-guidance": {"lenient": True}}}, InvalidArgumentError, "json_schema", "x-guidance"),
    ({"json_schema": "{"}, InvalidArgumentError, "json_schema", "JSON"),
    ({"json_schema": "[1]"}, InvalidArgumentError, "json_schema", "object"),
    ({"json_schema": 5}, InvalidArgumentError, "json_schema", "5"),
    ({"json_schema": {"a": {1, 2}}}, InvalidArgumentError, "json_schema", "set"),
    ({"json_schema": {"a": float("nan")}}, InvalidArgumentError, "json_schema", "JSON"),
    ({"regex": "("}, InvalidArgumentError, "regex", "unclosed"),
    ({"regex": "(a)\\1"}, UnsupportedError, "regex", "backreferences"),
    ({"regex": "x" * 200_000}, InvalidArgumentError, "regex", "131072"),
    ({"regex": "\ud800"}, InvalidArgumentError, "regex", "surrogate"),
    ({"grammar": "nothing"}, InvalidArgumentError, "grammar", "root"),
    ({"grammar": "root ::= [^a&&b]"}, InvalidArgumentError, "grammar", "&&"),
    ({"grammar": "root ::= " + "a\na ::= " * 1000 + '"b"'}, InvalidArgumentError, "grammar", "1000 rules"),
    ({"choice": ["x" * 4000] * 40}, InvalidArgumentError, "choice", "131072"),
    ({"choice": ["\ud800"]}, InvalidArgumentError, "choice", "surrogate"),
    ({"grammar": "start: a\n\nb: /[/"}, InvalidArgumentError, "grammar", "line 1"),
    ({"grammar": "root ::= a\n\n# c\na ::= [z-a]"}, InvalidArgumentError, "grammar", "rule a at line 4"),
    (
        {"grammar": "root ::= my-rule\n\nmy-rule ::= [z-a] root"},
        InvalidArgumentError,
        "grammar",
        "rule my-rule at line 3",
    ),
    ({"grammar": "root ::= b"}, InvalidArgumentError, "grammar", "'b'"),
    ({"grammar": 'root ::= "a'}, InvalidArgumentError, "grammar", "line 1"),
    ({"choice": ["a", ""]}, InvalidArgumentError, "choice", "characters"),
    ({"choice": ["a", 1]}, InvalidArgumentError, "choice", "strings"),
    ({"choice": ["a"], "regex": "a"}, InvalidArgumentError, "choice", "regex and choice"),
]


@pytest.mark.parametrize(("fields", "error", "param", "word"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_cannot_be_enforced_is_refused_by_name(make_llm, fields, error, param, word):
    with raises(error, param=param, match=re.escape(word)):
        make_llm().generate(PROMPT, SamplingParams(**fields))


def test_other_models_refuse_grammars(make_llm):
    for name, value in PAIRS.items():
        with raises(UnsupportedError, param=name):
            make_llm(files={}).generate([1, 2], SamplingParams(**{name: value}))


def test_empty_values_ask_for_nothing():
    params = SamplingParams(json_schema="", json_object=False, regex="", choice=[], grammar="")
    assert params == SamplingParams()
    assert params.answer_grammar is None
    assert set(GRAMMAR_FIELDS) <= set(SamplingParams.__dataclass_fields__)
    assert SamplingParams(json_schema={"a": 1, "b": 2}).json_schema == '{"a": 1, "b": 2}'


def test_grammars_are_compiled_once_and_forgotten_by_age(make_llm, monkeypatch):
    monkeypatch.setattr("penstock.text.grammar.compiler.MAX_KEPT", 2)
    compiler = make_llm()._grammars
    sources = [GrammarSource("regex", text) for text in "abc"]
    first = compiler.compile(sources[0])
    assert compiler.compile(sources[0]) is first
    compiler.compile(sources[1])
    assert compiler.compile(sources[0]) is first
    compiler.compile(sources[2])
    assert list(compiler._kept) == [sources[0], sources[2]]


def test_special_tokens_never_write_text(make_llm):
    """The ends of this model are special tokens, and one of them is called like a word."""
    compiler = GrammarCompiler(lambda: make_llm().tokenizer, 259, [1])
    mask = compiler.compile(GrammarSource("regex", "</s>|[^a]")).matcher().mask
    assert not np.unpackbits(mask.view(np.uint8), bitorder="little")[[0, 1]].any()


@pytest.mark.parametrize("kind", ["llama2 by its normalizer", "WordPiece"])
def test_answers_keep_their_first_space(make_llm, kind):
    """The tokenizers drop it when they decode, but the grammar asks for it."""
    tokenizer = KINDS[kind]()
    files = {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer.bin": segment_of(tokenizer)}
    llm = make_llm(files=files, vocab_size=tokenizer.get_vocab_size())
    for seed in range(4):
        grammar = {"regex": " [a-c]{1,3}( [a-c]{2}){2}"} if seed % 2 else {"choice": [" add", "add"]}
        params = SamplingParams(**HOT | grammar | {"seed": seed})
        answer = llm.generate([5, 6], params)
        assert answer.finish_reason == "stop"
        assert answer.text == b"".join(map(llm.tokenizer.token_bytes, answer.token_ids)).decode()
        assert "choice" in grammar or re.fullmatch(grammar["regex"], answer.text), answer.text
        assert "".join(delta.text for delta in llm.stream([5, 6], params)) == answer.text
    plain = llm.generate([5, 6], SamplingParams(**HOT))
    assert plain.text == llm.tokenizer.decode(plain.token_ids)


def test_json_begins_as_the_model_would(make_llm):
    """SentencePiece writes the first word of an answer with a space, which the text has not; exact texts keep it."""
    tokenizer = KINDS["llama2 by its normalizer"]()
    files = {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer.bin": segment_of(tokenizer)}
    llm = make_llm(files=files, vocab_size=tokenizer.get_vocab_size())
    tokens, specials = llm.tokenizer.vocabulary()
    (space,) = (number for number, token in enumerate(tokens) if token == b" " and number not in specials)
    for source, expected in (
        (GrammarSource("json_object", '{"type": "object"}'), 1),
        (GrammarSource("json_schema", '{"type": "object"}'), 1),
        (GrammarSource("regex", "add"), 0),
    ):
        mask = llm._grammars.compile(source).matcher().mask
        assert np.unpackbits(mask.view(np.uint8), bitorder="little")[space] == expected


def test_a_large_vocabulary_is_made_when_a_worker_starts(make_llm, monkeypatch):
    """Another thread cannot run while it is made."""
    llm, made = make_llm(), []
    make = grammar_compiler.make_vocabulary
    monkeypatch.setattr(grammar_compiler, "make_vocabulary", lambda *a: made.append(a) or make(*a))
    llm.prepare_grammars()
    assert made == []
    monkeypatch.setattr(grammar_compiler, "MIN_PREPARED", 1)
    llm.prepare_grammars()
    llm.generate(PROMPT, SamplingParams(**HOT, regex="[a-c]{4}"))
    assert len(made) == 1
    make_llm(files={}).prepare_grammars()


def test_the_library_is_imported_with_the_first_grammar():
    code = (
        "import sys, penstock, penstock.serving.http.app, penstock.llm.llm; "
        "assert not {'llguidance', 'jsonschema'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_requests_without_a_grammar_have_no_mask(make_llm):
    sampling = ResolvedSampling()
    assert sampling.grammar is None
    assert replace(sampling, seed=3).grammar is None
    llm = make_llm()
    request = llm.engine.submit([1, 2], ResolvedSampling(max_tokens=1))
    assert request.matcher is None
    llm.engine.wait(request, 0)


def test_a_grammar_is_found_as_long_as_somebody_refers_to_it(make_llm, monkeypatch):
    """Others may have replaced it among those that are kept before its request begins."""
    monkeypatch.setattr(grammar_compiler, "MAX_KEPT", 1)
    llm = make_llm()
    first = llm.compile_grammar(SamplingParams(regex="a"))
    second = llm.compile_grammar(SamplingParams(regex="a"))
    assert first.result(60) is second.result(60)
    llm.compile_grammar(SamplingParams(regex="b")).result(60)
    compiler = llm._grammars
    assert list(compiler._kept) == [GrammarSource("regex", "b")]
    assert compiler.compile(GrammarSource("regex", "a")) is first.result()
    assert llm.compile_grammar(SamplingParams()) is None
    with pytest.raises(InvalidArgumentError):
        llm.compile_grammar(SamplingParams(regex="(")).result(60)
