"""Generation over the blocks of a dataset of ``ray.data``.

Ray streams the blocks, starts as many predictors as it is told and starts a lost one again; each has its own model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

__all__ = ["PenstockPredictor"]


class PenstockPredictor:
    """A class for ``Dataset.map_batches``: it adds a column with the answers to a column of prompts.

    ``model``: a bundle or a checkpoint folder, at the same path on each node.  ``prompt_column``, ``answer_column``:
    names of columns.  ``options``: the arguments of ``LLM``, such as ``threads`` and ``limits``.  ``sampling``: the
    fields of ``SamplingParams``.  Answers do not depend on how Ray cuts the data into blocks.
    """

    def __init__(
        self,
        model: str,
        *,
        prompt_column: str = "prompt",
        answer_column: str = "answer",
        options: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        from penstock.engine.params import SamplingParams
        from penstock.llm.llm import LLM

        self._prompt_column, self._answer_column = prompt_column, answer_column
        self._params = SamplingParams(**(sampling or {}))
        self._llm = LLM(model, **(options or {}))

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the columns of a block and the answers, an array of strings.

        Raises InvalidArgumentError if there is no column of prompts, and the errors of ``LLM.generate``.
        """
        if self._prompt_column not in batch:
            names = ", ".join(sorted(batch)) or "none"
            raise InvalidArgumentError(f"prompt_column: expected one of {names}, got {self._prompt_column!r:.100}")
        prompts = [str(prompt) for prompt in batch[self._prompt_column]]
        results = self._llm.generate(prompts, self._params) if prompts else []
        return {**batch, self._answer_column: np.array([result.text for result in results], dtype=object)}

    def close(self) -> None:
        """Free the model's memory."""
        self._llm.close()
