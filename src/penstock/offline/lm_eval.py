"""The three questions of the language model evaluation harness (lm-eval), answered by an LLM in this process.

Texts in, plain numbers and texts out; ``examples/evaluation/run.py`` makes them a model of lm-eval's.  Contexts and
continuations become tokens the way the harness has them: a context's trailing spaces go with the continuation, both
are tokenized as one text, and what is beyond the context's tokens is the continuation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.llm.llm import LLM
from penstock.llm.result import Score
from penstock.validation import flag

__all__ = ["Evaluator"]

_MAX_TOKENS: Final = 256
_LENGTHS: Final = ("max_gen_toks", "max_new_tokens", "max_tokens")
_SAMPLING: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


class Evaluator:
    """An LLM that scores and continues texts.

    ``add_bos_token``: contexts begin with the begin-of-text token, as the tokenizer puts it; without, they never do.
    What is too long for the model's context loses its beginning.
    """

    def __init__(self, llm: LLM, add_bos_token: bool = False) -> None:
        self.llm = llm
        self._adds_bos = add_bos_token

    @property
    def prefix_id(self) -> int:
        """What a text is scored behind when nothing comes before it: the begin-of-text token, else the end's."""
        special = self.llm.tokenizer.special_tokens
        for name in ("bos_token", "eos_token"):
            found = self.llm.tokenizer.token_id(special[name]) if name in special else None
            if found is not None:
                return found
        raise UnsupportedError("the tokenizer names neither bos_token nor eos_token: a text needs one to begin behind")

    def loglikelihood(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Of each context and continuation the latter's log-probability, and whether greedy decoding makes it."""
        encoded = [self._encode_pair(*pair) for pair in pairs]
        return self._score(encoded)

    def loglikelihood_rolling(self, texts: Iterable[str]) -> list[float]:
        """The log-probability of each whole text.  One that is longer than the context is cut into windows, each token
        scored once; a window but the first begins behind as much as fits before its tokens.
        """
        totals = []
        for text in texts:
            ids = [self.prefix_id, *self.llm.tokenizer.encode(text, add_special_tokens=False)]
            windows, most = [], self.llm.engine.max_len
            for start in range(1, len(ids), most - 1):
                end = min(len(ids), start + most - 1)
                first = max(0, end - most)
                windows.append((ids[first:start], ids[start:end]))
            totals.append(sum((total for total, _ in self._score(windows)), 0.0))
        return totals

    def generate_until(self, requests: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Continue each context until one of its "until" strings, which is not part of the answer, or its length."""
        prompts, params = [], []
        for context, wanted in requests:
            params.append(_params(wanted))
            room = self.llm.engine.max_len - min(params[-1].max_tokens or 1, self.llm.engine.max_len // 2)
            prompts.append(self._encode(context)[-room:] or [self.prefix_id])
        results = self.llm.generate(prompts, params) if prompts else []
        return [result.text for result in results]

    def _score(self, encoded: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """(log-probability, greedy) of the second tokens behind the first."""
        most = self.llm.engine.max_len
        for _, rest in encoded:
            if len(rest) >= most:
                raise InvalidArgumentError(f"a continuation has {len(rest)} tokens, but the context holds {most}")
        known = [(context, rest) for context, rest in encoded if rest]
        scores = self.llm.score([(context + rest)[-most:] for context, rest in known]) if known else []
        found = iter(cast("list[Score]", scores))
        answers = []
        for _, rest in encoded:
            score = next(found) if rest else None
            start = len(score.token_ids) - len(rest) if score is not None else 0
            answers.append((0.0, True) if score is None else (score.total(start), score.is_greedy(start)))
        return answers

    def _encode(self, text: str) -> list[int]:
        return self.llm.tokenizer.encode(text, add_special_tokens=self._adds_bos)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if not context:
            rest = self.llm.tokenizer.encode(continuation, add_special_tokens=False)
            return ([], rest) if rest[:1] == [self.prefix_id] else ([self.prefix_id], rest)
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        whole, head = self._encode(context + continuation), self._encode(context)
        if not head:  # the context was nothing but spaces
            return [self.prefix_id], whole
        return whole[: len(head)], whole[len(head) :]


def _params(wanted: Mapping[str, Any]) -> SamplingParams:
    """The harness's words for sampling; InvalidArgumentError names the one that is not known."""
    given = {name: value for name, value in wanted.items() if value is not None}
    until = given.pop("until", [])
    samples = flag("do_sample", given.pop("do_sample", bool(given.get("temperature"))))
    lengths = [given.pop(name) for name in _LENGTHS if name in given]
    fields = {name: given.pop(name) for name in _SAMPLING if name in given}
    if given:
        raise InvalidArgumentError(
            f"generate_until: {', '.join(sorted(given))}: not known; known are until, do_sample, "
            f"{', '.join((*_LENGTHS, *_SAMPLING))}",
            param="generate_until",
        )
    if not samples:
        fields["temperature"] = 0.0
    return SamplingParams(max_tokens=lengths[0] if lengths else _MAX_TOKENS, stop=until, **fields)
