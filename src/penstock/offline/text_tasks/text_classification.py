"""The tasks text_classification and zero_shot_classification: classes of the model, and classes of the caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.checkpoint.pooling.files import network_score_function
from penstock.config import ConfigReader
from penstock.offline.text_tasks.text_task import TextTask, texts_of
from penstock.text.tasks.classes import ClassificationOptions, classes_of
from penstock.text.tasks.options import read_cut
from penstock.text.tasks.zero_shot import ZeroShotOptions, zero_shot_prompts
from penstock.validation import refusal, wrong_type

__all__ = ["TextClassification", "ZeroShotClassification"]


class TextClassification(TextTask[ClassificationOptions]):
    """The classes of texts, or of pairs of texts: ``{"text": ..., "text_pair": ...}``."""

    name = "text_classification"
    options_type = ClassificationOptions

    def check_model(self) -> None:
        """Expect a classifier of texts."""
        if not self.head.labels or self.head.task:
            raise self.refuse_model("a classifier of texts")
        self.function = self._find_function()

    def _find_function(self) -> str:
        """Return what makes scores of logits in transformers, which does not read the files of rerankers."""
        text = self.llm.files.get("config.json")
        if text is None or self.head.pair_format:  # a reranker of logits of tokens is no classifier of transformers
            return self.head.score_function
        return network_score_function(ConfigReader.parse(text), len(self.head.labels))

    def __call__(self, inputs: Any, **options: Any) -> Any:
        """Return ``{"label", "score"}`` of each text; with ``top_k`` a list of them, the likeliest first.

        A single text gives a list, as in transformers, unless the call has ``top_k``.
        """
        chosen = self._begin(options)
        several, is_one = texts_of(inputs, (str, Mapping, tuple))
        results = self.run(several, chosen)
        if is_one:
            return results if isinstance(inputs, str) and "top_k" not in options else results[0]
        return results

    def run(self, inputs: list[Any], options: ClassificationOptions) -> list[Any]:
        """Return the classes of each input."""
        cut = read_cut(options.truncation, options.max_length)
        limit = min(options.max_length or self.max_len, self.max_len) if cut else 0
        prompts = [self.text_ids(*_pair(item), limit, cut) for item in inputs]
        return [classes_of(logits, self.head.labels, self.function, options) for logits in self.rows(prompts)]


def _pair(item: Any) -> tuple[str, str | None]:
    """Return the text and the second text of an input."""
    if isinstance(item, str):
        return item, None
    if isinstance(item, Mapping):
        unknown = set(item) - {"text", "text_pair"}
        if unknown or "text" not in item:
            raise refusal("inputs", "the keys text and text_pair", sorted(map(str, item)))
        item = (item["text"], item.get("text_pair"))
    if len(item) != 2 or not isinstance(item[0], str) or not isinstance(item[1], str | None):
        raise wrong_type("inputs", "a text or a pair of texts", item)
    return item[0], item[1]


class ZeroShotClassification(TextTask[ZeroShotOptions]):
    """Classes that the caller names, by a classifier of natural language inference (Yin et al., arXiv 1909.00161)."""

    name = "zero_shot_classification"
    options_type = ZeroShotOptions

    def check_model(self) -> None:
        """Expect a classifier of at least two classes."""
        if len(self.head.labels) < 2 or self.head.task:
            raise self.refuse_model("a classifier of natural language inference")

    def __call__(self, inputs: Any, candidate_labels: Any = None, **options: Any) -> Any:
        """Return ``{"sequence", "labels", "scores"}`` of each text, the likeliest label first."""
        if candidate_labels is not None:
            options["candidate_labels"] = candidate_labels
        return super().__call__(inputs, **options)

    def run(self, inputs: list[Any], options: ZeroShotOptions) -> list[Any]:
        """Return the labels of each text.  The text is cut to what the model reads; the label never is."""
        asked = zero_shot_prompts(self.tokenizer, self.head.labels, inputs, options, self.max_len)
        return asked.results(self.rows(asked.prompts))
