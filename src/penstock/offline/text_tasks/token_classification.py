"""The task token_classification: the class of each token, or of groups of tokens, with its place in the text."""

from __future__ import annotations

from typing import Any

from penstock.checkpoint.pooling.head import TOKEN_TASK
from penstock.offline.text_tasks.text_task import TextTask, texts_of
from penstock.text.tasks.entities import TokenOptions, entity_prompts
from penstock.validation import wrong_type

__all__ = ["TokenClassification"]


class TokenClassification(TextTask[TokenOptions]):
    """The classes of the tokens of texts, such as the names of persons and places."""

    name = TOKEN_TASK
    options_type = TokenOptions

    def check_model(self) -> None:
        """Expect a classifier of tokens."""
        if self.head.task != TOKEN_TASK:
            raise self.refuse_model("a classifier of tokens")

    def __call__(self, inputs: Any, **options: Any) -> Any:
        """Return the tokens, or the groups, of each text: ``{"entity", "score", "index", "word", "start", "end"}``.

        A group has ``entity_group`` in place of ``entity``, and no index.
        """
        chosen = self._begin(options)
        if chosen.is_split_into_words:
            several, is_one = _word_lists(inputs)
        else:
            several, is_one = texts_of(inputs)
        results = self.run(several, chosen)
        return results[0] if is_one else results

    def run(self, inputs: list[Any], options: TokenOptions) -> list[Any]:
        """Return the entities of each text."""
        asked = entity_prompts(self.tokenizer, self.head.labels, inputs, options, self.max_len)
        return asked.results(self.rows(asked.prompts))


def _word_lists(inputs: Any) -> tuple[list[list[str]], bool]:
    """Return lists of words, and whether it was a single one."""
    listed = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    is_one = bool(listed) and all(isinstance(word, str) for word in listed)
    several = [listed] if is_one else [list(words) if isinstance(words, (list, tuple)) else [words] for words in listed]
    if isinstance(inputs, str) or not all(isinstance(word, str) for words in several for word in words):
        raise wrong_type("inputs", "a list of words, or a list of such lists", inputs)
    return several, is_one
