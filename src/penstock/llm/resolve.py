"""Resolves a caller's sampling parameters to those that a request runs with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.checkpoint.generation import GenerationDefaults
from penstock.engine.capabilities import refuse_sampling
from penstock.engine.params import ResolvedSampling, SamplingParams
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.text.text_stream import StopRules, TextStream
from penstock.text.tokenizer import Tokenizer
from penstock.validation import check_listed, check_vocabulary

if TYPE_CHECKING:
    from penstock.text.answer.budget import ThoughtsBudget
    from penstock.text.grammar.compiler import GrammarCompiler

__all__ = ["answer_text", "default_sampling", "end_ids", "resolve_params"]


def default_sampling(generation: GenerationDefaults, tail: str, bidirectional: bool) -> ResolvedSampling:
    """Return a model's sampling defaults.

    They are greedy if the graph chooses the tokens, and max_tokens is 1 if the model is not causal.
    """
    defaults = ResolvedSampling() if tail else ResolvedSampling.of_model(generation)
    return replace(defaults, max_tokens=1) if bidirectional else defaults


def end_ids(params: SamplingParams, model_ends: frozenset[int]) -> frozenset[int]:
    """Return the tokens that end an answer."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else model_ends)


def resolve_params(
    params: SamplingParams,
    defaults: ResolvedSampling,
    *,
    ends: frozenset[int],
    vocab_size: int,
    tail: str,
    tokenizer: Callable[[], Tokenizer] | None,
    grammars: GrammarCompiler | None = None,
) -> ResolvedSampling:
    """Return the parameters that a request runs with.

    Raises InvalidArgumentError or UnsupportedError naming the field that a model with this vocabulary, ending in
    ``tail``, cannot do.  ``tokenizer`` is None if the model has none; its answers then have no text.
    """
    if (params.stop or params.bad_words or params.echo) and tokenizer is None:
        name = "stop" if params.stop else "bad_words" if params.bad_words else "echo"
        raise UnsupportedError(f"{name}: this model has no tokenizer.json, so its answers have no text", param=name)
    if tail:
        refuse_sampling(params, tail)
    bad_ids: tuple[tuple[int, ...], ...] = ()
    if tokenizer is not None and params.bad_words:
        bad_ids = tuple(dict.fromkeys(ids for word in params.bad_words for ids in tokenizer().spellings(word)))
    check_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)
    check_listed("prompt_logprobs", params.prompt_logprobs or 0, vocab_size)
    resolved = ResolvedSampling.of(params, defaults)
    source = params.answer_grammar
    if source is not None and (tokenizer is None or grammars is None):
        raise UnsupportedError(f"{source.field}: this model has no tokenizer.json", param=source.field)
    grammar = None if source is None or grammars is None else grammars.compile(source)
    if source is not None:
        resolved = _without_forced(params, resolved, source.field)
    thoughts = _thoughts_budget(params, tokenizer, vocab_size)
    resolved = replace(resolved, bad_words=bad_ids, end_ids=tuple(sorted(ends)), grammar=grammar, thoughts=thoughts)
    resolved.check_vocabulary(vocab_size)
    return resolved


def _without_forced(params: SamplingParams, resolved: ResolvedSampling, field: str) -> ResolvedSampling:
    """Drop what the model's defaults force or forbid, of which a grammar may allow the contrary only.

    Raises InvalidArgumentError for forced tokens of the caller; its ``no_repeat_ngram_size`` stays.
    """
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        if getattr(params, name) is not None:
            raise InvalidArgumentError(f"{name}: expected none beside {field}, which sets each token", param=name)
    ngram_size = params.no_repeat_ngram_size or 0
    return replace(resolved, forced_bos_token_id=-1, forced_eos_token_id=-1, no_repeat_ngram_size=ngram_size)


def _thoughts_budget(
    params: SamplingParams, tokenizer: Callable[[], Tokenizer] | None, vocab_size: int
) -> ThoughtsBudget | None:
    """Return the limit on the thoughts.  Raises UnsupportedError for a model without thoughts."""
    if params.thinking_token_budget is None:
        return None
    from penstock.text.answer.budget import ThoughtsBudget
    from penstock.text.answer.formats import find_reasoning_format
    from penstock.text.answer.response_template import declared_formats

    own = None if tokenizer is None else tokenizer()
    template = "" if own is None else own.chat_template or ""
    declared = None if own is None else declared_formats(own)
    form = find_reasoning_format(params.thinking_format or "auto", template, "thinking_format", declared)
    if own is None or form is None:
        name = "thinking_token_budget"
        raise UnsupportedError(
            f"{name}: expected a model whose chat template has thoughts. Name their format in thinking_format, or "
            "leave the field out",
            param=name,
        )
    return ThoughtsBudget.of(params.thinking_token_budget, form, own, vocab_size)


def answer_text(
    tokenizer: Tokenizer, params: SamplingParams, ends: frozenset[int], prompt: str | Sequence[int]
) -> TextStream:
    """Return the text stream of an answer to ``prompt``.  A grammar describes the bytes of the answer's tokens."""
    shown = prompt if isinstance(prompt, str) else tokenizer.decode(prompt) if params.echo else ""
    rules = StopRules(
        params.stop,
        ends,
        params.include_stop_str_in_output,
        params.min_tokens,
        params.skip_special_tokens,
        keeps_bytes=params.answer_grammar is not None,
        kept_special_ids=frozenset(params.kept_special_token_ids),
    )
    return TextStream(tokenizer, rules, echo=shown if params.echo else "")
