"""The three request types of the language model evaluation harness (lm-eval), for an LLM in this process.

Inputs are texts; outputs are plain numbers and texts.  ``examples/evaluation/run.py`` wraps them as a model of lm-eval.
Contexts and continuations are tokenized as in the harness: trailing spaces of the context move to the continuation,
both are tokenized as one text, and the tokens after those of the context are the continuation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

from penstock.config import check_flag
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.llm.llm import LLM
from penstock.llm.result import Score

__all__ = ["Evaluator"]

_MAX_TOKENS: Final = 256
_LENGTHS: Final = ("max_gen_toks", "max_new_tokens", "max_tokens")
_SAMPLING: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


class Evaluator:
    """An LLM that scores and continues texts.

    ``add_bos_token``: begin contexts with the begin-of-text token, as the tokenizer does.  A text that is longer than
    the model's context loses its beginning.
    """

    def __init__(self, llm: LLM, add_bos_token: bool = False) -> None:
        self.llm = llm
        self._adds_bos = add_bos_token

    @property
    def prefix_id(self) -> int:
        """The token before a text without a context: the begin-of-text token, or else the end-of-text token."""
        special = self.llm.tokenizer.special_tokens
        for name in ("bos_token", "eos_token"):
            token = self.llm.tokenizer.token_id(special[name]) if name in special else None
            if token is not None:
                return token
        raise UnsupportedError(
            "the tokenizer has neither bos_token nor eos_token, one of which must precede a text", param="bos_token"
        )

    def loglikelihood(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return, per context and continuation, the continuation's log-probability and whether it is the greedy one."""
        encoded = [self._encode_pair(*pair) for pair in pairs]
        return self._score(encoded)

    def loglikelihood_rolling(self, texts: Iterable[str]) -> list[float]:
        """Return the log-probability of each text.

        A text that is longer than the context is split into windows, and each token is scored once.  Every window after
        the first begins with as many earlier tokens as fit.
        """
        totals = []
        for text in texts:
            ids = [self.prefix_id, *self.llm.tokenizer.encode(text, add_special_tokens=False)]
            windows, max_len = [], self.llm.engine.max_len
            for start in range(1, len(ids), max_len - 1):
                end = min(len(ids), start + max_len - 1)
                first = max(0, end - max_len)
                windows.append((ids[first:start], ids[start:end]))
            totals.append(sum((total for total, _ in self._score(windows)), 0.0))
        return totals

    def generate_until(self, requests: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Continue each context up to its length limit or one of its "until" strings, which the answer excludes."""
        prompts, params = [], []
        for context, arguments in requests:
            params.append(_params(arguments))
            room = self.llm.engine.max_len - min(params[-1].max_tokens or 1, self.llm.engine.max_len // 2)
            prompts.append(self._encode(context)[-room:] or [self.prefix_id])
        results = self.llm.generate(prompts, params) if prompts else []
        return [result.text for result in results]

    def _score(self, encoded: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return (log-probability, is greedy) of each continuation after its context."""
        max_len = self.llm.engine.max_len
        for _, continuation in encoded:
            if len(continuation) >= max_len:
                raise InvalidArgumentError(
                    f"a continuation has {len(continuation)} tokens, but the context holds {max_len}",
                    param="continuation",
                )
        pairs = [(context, continuation) for context, continuation in encoded if continuation]
        scores = (
            self.llm.score([(context + continuation)[-max_len:] for context, continuation in pairs]) if pairs else []
        )
        remaining = iter(cast("list[Score]", scores))
        answers = []
        for _, continuation in encoded:
            score = next(remaining) if continuation else None
            start = len(score.token_ids) - len(continuation) if score is not None else 0
            answers.append((0.0, True) if score is None else (score.total(start), score.is_greedy(start)))
        return answers

    def _encode(self, text: str) -> list[int]:
        return self.llm.tokenizer.encode(text, add_special_tokens=self._adds_bos)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if not context:
            continuation_ids = self.llm.tokenizer.encode(continuation, add_special_tokens=False)
            return (
                ([], continuation_ids)
                if continuation_ids[:1] == [self.prefix_id]
                else ([self.prefix_id], continuation_ids)
            )
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        whole, head = self._encode(context + continuation), self._encode(context)
        if not head:  # the context has only spaces
            return [self.prefix_id], whole
        return whole[: len(head)], whole[len(head) :]


def _params(arguments: Mapping[str, Any]) -> SamplingParams:
    """Convert the harness's names of sampling fields; InvalidArgumentError for an unknown one."""
    values = {name: value for name, value in arguments.items() if value is not None}
    until = values.pop("until", [])
    samples = check_flag("do_sample", values.pop("do_sample", bool(values.get("temperature"))))
    lengths = [values.pop(name) for name in _LENGTHS if name in values]
    fields = {name: values.pop(name) for name in _SAMPLING if name in values}
    if values:
        raise InvalidArgumentError(
            f"generate_until: unknown {', '.join(sorted(values))}; expected until, do_sample, "
            f"{', '.join((*_LENGTHS, *_SAMPLING))}",
            param="generate_until",
        )
    if not samples:
        fields["temperature"] = 0.0
    return SamplingParams(max_tokens=lengths[0] if lengths else _MAX_TOKENS, stop=until, **fields)
