"""Entities: the class of each token, or of groups of tokens, with its place in the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.pooling.head import SCORE_FUNCTIONS
from penstock.checkpoint.tokenizer_frames import TextWindow, WindowRequest
from penstock.config import check_choice, check_flag, check_integer
from penstock.errors import InvalidArgumentError
from penstock.text.tasks.options import Options, TaskPrompts, windows_of
from penstock.text.tokenizer import Tokenizer
from penstock.validation import strings, wrong_type

__all__ = ["TokenOptions", "entity_prompts"]

_OF_WORDS: Final = ("first", "average", "max")
STRATEGIES: Final = ("none", "simple", *_OF_WORDS)
_MAX: Final = 2**31 - 1
_Join = Callable[[Sequence[Sequence[str]]], list[str]]
Entity = dict[str, Any]


@dataclass(frozen=True)
class TokenOptions(Options):
    """``aggregation_strategy``: "none" (each token), "simple", "first", "average" or "max" (groups of equal classes).

    ``stride``: a long text is computed in windows that share so many tokens; None cuts its end.
    ``is_split_into_words``: a text is a list of words, between which ``delimiter`` is put.
    """

    aggregation_strategy: str = "none"
    ignore_labels: Any = ("O",)
    stride: int | None = None
    is_split_into_words: bool = False
    delimiter: str | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        strategy = self.aggregation_strategy
        strategy = strategy.lower() if isinstance(strategy, str) else "none" if strategy is None else strategy
        object.__setattr__(self, "aggregation_strategy", check_choice("aggregation_strategy", strategy, STRATEGIES))
        ignored = ("O",) if self.ignore_labels is None else self.ignore_labels
        ignored = list(ignored) if isinstance(ignored, (tuple, set, frozenset)) else ignored
        object.__setattr__(self, "ignore_labels", strings("ignore_labels", ignored, _MAX))
        check_flag("is_split_into_words", self.is_split_into_words)
        if self.stride is not None:
            check_integer("stride", self.stride, 0, _MAX)
            if strategy == "none":
                raise InvalidArgumentError(
                    "stride: expected with an aggregation_strategy other than none", param="stride"
                )
        if self.delimiter is not None and not isinstance(self.delimiter, str):
            raise wrong_type("delimiter", "a string", self.delimiter)


def entity_prompts(
    tokenizer: Tokenizer,
    labels: Sequence[str],
    inputs: Sequence[str | list[str]],
    options: TokenOptions,
    max_len: int,
    max_tokens: int = 0,
) -> TaskPrompts:
    """Return the prompts of texts, or of lists of words, whose rows are the logits of ``labels``.

    ``max_len`` is the most tokens of a prompt, ``max_tokens`` (0: no limit) that of all prompts.
    """
    stride = options.stride
    requests = [WindowRequest(text, max_len=max_len, stride=stride or 0) for text in inputs]
    windows = [every[: None if stride is not None else 1] for every in windows_of(tokenizer, requests, max_tokens)]

    def results(logits: Sequence[NDArray[np.float32]]) -> list[Any]:
        rows = iter(logits)
        unk = tokenizer.special_tokens.get("unk_token")
        unk_id = None if unk is None else tokenizer.token_id(unk)
        entities = []
        for text, each in zip(inputs, windows, strict=True):
            source = _TokenSource.of(text, options, unk_id, tokenizer.has_subword_prefix)
            kept: list[Entity] = []
            for window in each:
                scores = np.array([SCORE_FUNCTIONS["softmax"](row) for row in next(rows).astype(np.float64)])
                groups = aggregate(
                    source.tokens(window, scores), options.aggregation_strategy, labels, tokenizer.join_tokens
                )
                key = "entity" if options.aggregation_strategy == "none" else "entity_group"
                kept += [group for group in groups if group[key] not in options.ignore_labels]
            entities.append(without_overlaps(kept) if len(each) > 1 else kept)
        return entities

    return TaskPrompts([window.ids for each in windows for window in each], results)


@dataclass(frozen=True)
class _TokenSource:
    """A text, and what decides whether a token continues a word.  ``begins``: the place of each of its words."""

    text: str
    begins: tuple[int, ...]
    unk_id: int | None
    has_subword_prefix: bool

    @classmethod
    def of(cls, text: Any, options: TokenOptions, unk_id: int | None, has_subword_prefix: bool) -> _TokenSource:
        if not options.is_split_into_words:
            return cls(text, (), unk_id, has_subword_prefix)
        delimiter = " " if options.delimiter is None else options.delimiter
        begins = [0]
        for word in text:
            begins.append(begins[-1] + len(word) + len(delimiter))
        return cls(delimiter.join(text), tuple(begins), unk_id, has_subword_prefix)

    def tokens(self, window: TextWindow, scores: NDArray[np.float64]) -> list[Entity]:
        """Return the tokens of a window that are not special, each with its ``scores``."""
        tokens = []
        for index, token in enumerate(window.ids):
            if window.special[index]:
                continue
            shift = self.begins[window.words[index]] if self.begins and window.words[index] >= 0 else 0
            start, end, word = window.starts[index] + shift, window.ends[index] + shift, window.tokens[index]
            part = self.text[start:end]
            if self.has_subword_prefix:
                continues = len(word) != len(part)
            else:
                continues = start > 0 and " " not in self.text[start - 1 : start + 1]
            if token == self.unk_id:
                word, continues = part, False
            place = {"word": word, "start": start, "end": end, "index": index}
            tokens.append({"scores": scores[index], "continues": continues, **place})
        return tokens


def aggregate(tokens: list[Entity], strategy: str, labels: Sequence[str], join: _Join) -> list[Entity]:
    """Return the entities that a strategy makes of tokens, as transformers does."""
    if strategy in _OF_WORDS:
        words: list[list[Entity]] = []
        for token in tokens:
            if words and token["continues"]:
                words[-1].append(token)
            else:
                words.append([token])
        texts = join([[token["word"] for token in word] for word in words]) if words else []
        return _groups([_word(*each, strategy, labels) for each in zip(words, texts, strict=True)], join)
    entities = []
    for token in tokens:
        best = int(token["scores"].argmax())
        place = {name: token[name] for name in ("index", "word", "start", "end")}
        entities.append({"entity": labels[best], "score": float(token["scores"][best]), **place})
    return entities if strategy == "none" else _groups(entities, join)


def _word(tokens: list[Entity], text: str, strategy: str, labels: Sequence[str]) -> Entity:
    if strategy == "average":
        scores = np.mean([token["scores"] for token in tokens], axis=0)
    elif strategy == "max":
        scores = max(tokens, key=lambda token: float(token["scores"].max()))["scores"]
    else:
        scores = tokens[0]["scores"]
    best = int(scores.argmax())
    place = {"word": text, "start": tokens[0]["start"], "end": tokens[-1]["end"]}
    return {"entity": labels[best], "score": float(scores[best]), **place}


def _groups(entities: list[Entity], join: _Join) -> list[Entity]:
    """Return neighbours of equal class as one; "B-" begins another, and "I-" goes on."""
    groups = [[entity] for entity in entities[:1]]
    for last, entity in pairwise(entities):
        if _class_of(entity) == _class_of(last) and not entity["entity"].startswith("B-"):
            groups[-1].append(entity)
        else:
            groups.append([entity])
    texts = join([[entity["word"] for entity in group] for group in groups]) if groups else []
    return [
        {
            "entity_group": group[0]["entity"].split("-", 1)[-1],
            "score": float(np.mean([entity["score"] for entity in group])),
            "word": text,
            "start": group[0]["start"],
            "end": group[-1]["end"],
        }
        for group, text in zip(groups, texts, strict=True)
    ]


def _class_of(entity: Entity) -> str:
    name: str = entity["entity"]
    return name[2:] if name.startswith(("B-", "I-")) else name


def without_overlaps(entities: list[Entity]) -> list[Entity]:
    """Return the longest of entities that several windows have, of equally long ones the likeliest."""
    kept: list[Entity] = []
    for entity in sorted(entities, key=lambda each: int(each["start"])):
        last = kept[-1] if kept else None
        if last is None or not last["start"] <= entity["start"] < last["end"]:
            kept.append(entity)
        elif (entity["end"] - entity["start"], entity["score"]) > (last["end"] - last["start"], last["score"]):
            kept[-1] = entity
    return kept
