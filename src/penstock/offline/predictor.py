"""Generation over the blocks of a dataset of ``ray.data``.

Ray streams the blocks, starts as many predictors as it is told and starts a lost one again; each has its own model.
With a folder for checkpoints a job that was ended continues when it is started again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import InvalidArgumentError
from penstock.graph.bundle_id import bundle_id
from penstock.offline.block_checkpoints import BlockCheckpoints

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

__all__ = ["PenstockPredictor"]


class PenstockPredictor:
    """A class for ``Dataset.map_batches``: it adds a column with the answers to a column of prompts.

    ``model``: a bundle or a checkpoint folder, at the same path on each node.  ``prompt_column``, ``answer_column``:
    names of columns.  ``options``: the arguments of ``LLM``, such as ``threads`` and ``limits``.  ``sampling``: the
    fields of ``SamplingParams``.  Answers do not depend on how Ray cuts the data into blocks.  ``checkpoint``: a folder
    that all nodes share, for the answers of each block; "" keeps none.  A block with the same prompts, the same bundle
    and the same sampling is then read from there.  Blocks are the same again if the data and the size of batches are.
    """

    def __init__(
        self,
        model: str,
        *,
        prompt_column: str = "prompt",
        answer_column: str = "answer",
        options: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        checkpoint: str = "",
    ) -> None:
        from penstock.engine.params import SamplingParams
        from penstock.llm.llm import LLM

        self._prompt_column, self._answer_column = prompt_column, answer_column
        self._params = SamplingParams(**(sampling or {}))
        facts = json.dumps([bundle_id(model) or str(model), sampling or {}], sort_keys=True, default=repr)
        self._checkpoints = BlockCheckpoints(Path(checkpoint), facts) if checkpoint else None
        self._llm = LLM(model, **(options or {}))

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the columns of a block and the answers, an array of strings.

        Raises InvalidArgumentError if there is no column of prompts, the errors of ``LLM.generate``, and for
        checkpoints FileAccessError and InvalidFileError.
        """
        if self._prompt_column not in batch:
            names = ", ".join(sorted(batch)) or "none"
            raise InvalidArgumentError(
                f"prompt_column: expected one of {names}, got {self._prompt_column!r:.100}", param="prompt_column"
            )
        prompts = [str(prompt) for prompt in batch[self._prompt_column]]
        return {**batch, self._answer_column: np.array(self._answers(prompts), dtype=object)}

    def _answers(self, prompts: list[str]) -> list[str]:
        if not prompts:
            return []
        known = None if self._checkpoints is None else self._checkpoints.read(prompts)
        if known is not None:
            return known
        answers = [result.text for result in self._llm.generate(prompts, self._params)]
        if self._checkpoints is not None:
            self._checkpoints.write(prompts, answers)
        return answers

    def close(self) -> None:
        """Free the model's memory."""
        self._llm.close()
