"""The task feature_extraction: the hidden rows of all tokens of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.config import check_flag
from penstock.offline.text_tasks.text_task import TextTask
from penstock.text.tasks.options import Options, read_cut

__all__ = ["FeatureExtraction"]


@dataclass(frozen=True)
class FeatureOptions(Options):
    """``truncation`` cuts a text to what the model reads; ``return_tensors`` returns an array instead of lists."""

    truncation: bool | str | None = None
    return_tensors: bool | str = False

    def __post_init__(self) -> None:
        """Check the options."""
        read_cut(self.truncation)
        if self.return_tensors != "np":
            check_flag("return_tensors", self.return_tensors)


class FeatureExtraction(TextTask[FeatureOptions]):
    """The hidden rows after the last norm, [1, len, hidden_size] for each text.

    ``LLM.embed`` makes one vector of them, as the files of sentence-transformers say.
    """

    name = "feature_extraction"
    options_type = FeatureOptions

    def check_model(self) -> None:
        """Every network with hidden rows can do this."""
        if not self.llm.info.hidden_size:
            raise self.refuse_model("a network with hidden rows")

    def run(self, inputs: list[Any], options: FeatureOptions) -> list[Any]:
        """Return the rows of each text."""
        cut = read_cut(options.truncation)
        limit = self.max_len if cut else 0
        features = self.rows([self.text_ids(text, None, limit, cut) for text in inputs], "all")
        return [rows[None] if options.return_tensors else [rows.tolist()] for rows in features]
