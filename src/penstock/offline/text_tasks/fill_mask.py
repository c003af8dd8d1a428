"""The task fill_mask: the likeliest tokens in the place of a mask."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.pooling.head import SCORE_FUNCTIONS
from penstock.config import check_integer
from penstock.core.native import Sampled
from penstock.engine.options import RequestOptions
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.llm.open_requests import run_prompts
from penstock.llm.prompts import check_each
from penstock.offline.text_tasks.text_task import TextTask, texts_of
from penstock.runtime.program import Program
from penstock.text.tasks.fillings import FillingOptions, fillings_of, find_mask
from penstock.text.tasks.options import read_cut
from penstock.validation import refusal, wrong_type

__all__ = ["FillMask"]

_LOG = logging.getLogger(__name__)
_MAX: Final = 2**31 - 1
_AT_ONCE: Final = 64
"""The texts whose logits are kept at a time."""


@dataclass(frozen=True)
class FillMaskOptions(FillingOptions):
    """``top_k`` and ``targets`` are those of FillingOptions.

    ``tokenizer_kwargs``: "truncation" or "max_length" cuts a text to so many tokens, or to what the model reads.
    """

    tokenizer_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if not isinstance(self.tokenizer_kwargs, Mapping):
            raise wrong_type("tokenizer_kwargs", "a mapping", self.tokenizer_kwargs)
        for name in self.tokenizer_kwargs:
            if name not in ("truncation", "max_length"):
                raise refusal("tokenizer_kwargs", "truncation and max_length", name)
        if self.tokenizer_kwargs.get("max_length") is not None:
            check_integer("max_length", self.tokenizer_kwargs["max_length"], 1, _MAX)
        self.limit(_MAX)

    def limit(self, max_len: int) -> tuple[int, str]:
        """Return the most tokens of a text and which text is cut; 0 refuses a longer one."""
        length = self.tokenizer_kwargs.get("max_length")
        cut = read_cut(self.tokenizer_kwargs.get("truncation"), length)
        return (min(length or max_len, max_len), cut) if cut else (0, cut)


class _PlaceLogits:
    """Collects the logits of some positions of a prompt, [places, vocab]."""

    num_logprobs = -1
    scores = None

    def __init__(self, places: Sequence[int]) -> None:
        self._places = list(places)
        self.rows: list[NDArray[np.float32]] = []
        self.num_taken = 0

    def take(self, prompt_len: int, program: Program, sampled: Sampled, rows: range) -> None:
        """Copy the wanted rows out of the program's memory."""
        logits, start = program.logits(), self.num_taken
        self.num_taken += len(rows)
        wanted = [rows.start + place - start for place in self._places if start <= place < self.num_taken]
        self.rows += [logits[row].copy() for row in wanted]


class FillMask(TextTask[FillMaskOptions]):
    """The likeliest tokens for each mask of a text."""

    name = "fill_mask"
    options_type = FillMaskOptions

    def check_model(self) -> None:
        """Expect an encoder with a masked-language head."""
        if not self.llm.info.bidirectional or not self.llm.engine.has_language_head:
            raise self.refuse_model("an encoder with a masked-language head")
        mask = find_mask(self.tokenizer)
        if mask is None:
            raise UnsupportedError("task: fill_mask: expected a tokenizer with a mask_token, got none", param="task")
        self.mask, self.mask_token = mask

    def __call__(self, inputs: Any, **options: Any) -> Any:
        """Return a list of ``{"score", "token", "token_str", "sequence"}`` for each text, the likeliest first.

        A text with several masks gives a list of such lists.
        """
        chosen = self._begin(options)
        several, is_one = texts_of(inputs)
        results = self.run(several, chosen)
        return results[0] if is_one or len(results) == 1 else results

    def run(self, inputs: list[Any], options: FillMaskOptions) -> list[Any]:
        """Return the fillings of each text."""
        limit = options.limit(self.max_len)
        targets, replaced = options.target_ids(self.tokenizer)
        for target, token in replaced.items():
            _LOG.warning("penstock: targets: %r is no token; its first token is %s", target[:60], token)
        prompts = check_each(inputs, False, lambda text: self._prompt(self.text_ids(text, None, *limit)))
        results = []
        for start in range(0, len(prompts), _AT_ONCE):
            part = prompts[start : start + _AT_ONCE]
            logits = [_PlaceLogits([i for i, token in enumerate(ids) if token == self.mask]) for ids in part]
            run_prompts(self.llm.engine, zip(part, logits, strict=True), False, RequestOptions(), first=start)
            results += [
                self._fillings(ids, each.rows, options, targets) for ids, each in zip(part, logits, strict=True)
            ]
        return results

    def _prompt(self, ids: Sequence[int]) -> list[int]:
        checked = self.llm.engine.check_prompt(ids, answer_len=0)
        if self.mask not in checked:
            raise InvalidArgumentError(f"inputs: expected a text with {self.mask_token}, got none", param="inputs")
        return checked

    def _fillings(
        self,
        ids: list[int],
        rows: Sequence[NDArray[np.float32]],
        options: FillMaskOptions,
        targets: list[int],
    ) -> list[Any]:
        places = [i for i, token in enumerate(ids) if token == self.mask]
        best = []
        for place, row in zip(places, rows, strict=True):
            scores = SCORE_FUNCTIONS["softmax"](row.astype(np.float64))
            tokens = np.array(targets) if targets else np.arange(len(scores))
            order = np.argsort(-scores[tokens], kind="stable")[: options.top_k]
            best.append((place, [(token, float(scores[token])) for token in tokens[order].tolist()]))
        return fillings_of(self.tokenizer, ids, best)
