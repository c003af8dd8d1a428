"""Bundles of earlier releases, and what they answered."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, Final, TypedDict

import numpy as np
import numpy.typing as npt

from penstock.core import native
from penstock.engine.params import SamplingParams
from penstock.llm.llm import LLM

__all__ = ["MAX_TOKENS", "PROMPTS", "WAYS", "Answers", "answers_of", "logits_of", "params_of"]

PROMPTS: Final = (
    "def main() -> None:",
    "näïve 日本 \U0001f642\n\n",
    "for name in names:\n    for name in names:\n    for",
)
MAX_TOKENS: Final = 24
WAYS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "seed": 20261122},
}


class Answers(TypedDict):
    """Of a bundle: by prompt and way the tokens and their text; the checksum of a prompt's logits."""

    logits_crc32: int
    answers: list[dict[str, dict[str, Any]]]


def params_of(way: str) -> SamplingParams:
    return SamplingParams(max_tokens=MAX_TOKENS, **WAYS[way])


def logits_of(path: Path, cpu_level: str | None = None) -> npt.NDArray[np.float32]:
    """Of every token of a prompt of 40 ids, [40, vocab]; keys and values take a second page, in float32."""
    ids = (np.arange(40, dtype=np.int32) * 37) % 320
    with native.Model.open(path, verify=True) as model, native.Context(2, cpu_level) as context:
        options = native.ProgramOptions(max_tokens=40, max_requests=1, max_rows=40, num_pages=2)
        with native.CoreProgram(model, context, options) as program:
            program.run(
                native.StepBatch(
                    token_ids=ids,
                    positions=np.arange(40, dtype=np.int32),
                    request_starts=np.array([0, 40], np.int32),
                    page_tables=np.array([[[0, 1]]], np.int32),
                    output_rows=np.arange(40, dtype=np.int32),
                )
            )
            return program.logits().copy()


def answers_of(path: Path) -> Answers:
    with LLM(path) as llm:
        found: list[dict[str, dict[str, Any]]] = []
        for prompt in PROMPTS:
            ways = {way: llm.generate(prompt, params_of(way)) for way in WAYS}
            found.append({
                way: {"token_ids": list(one.token_ids), "text": one.text, "finish_reason": one.finish_reason}
                for way, one in ways.items()
            })  # fmt: skip
    return {"logits_crc32": zlib.crc32(logits_of(path).tobytes()), "answers": found}
