"""Judges quantized weights by their divergence from the original on texts that no method saw.

The work of a long measurement lies in a hidden folder beside the output, so that a killed run continues.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from penstock.calibration.divergence import LogitsProgram, MeanDivergence, measure_divergence, write_reference
from penstock.calibration.texts import CalibrationData, calibration_data
from penstock.calibration.unfinished import Workspace
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.gguf.imatrix import is_imatrix
from penstock.errors import InvalidArgumentError
from penstock.graph.export import export_bundle
from penstock.llm.llm import LLM
from penstock.runtime.build import Progress, ProgressCallback
from penstock.runtime.open import open_program
from penstock.runtime.program import ProgramLimits

__all__ = ["MAX_JUDGED_TOKENS", "Judge", "check_texts", "file_stamp", "split_data"]

MAX_JUDGED_TOKENS: Final = 8192
"""The tokens that a divergence is measured on, at most; the study of docs/guides/quantization.md needs 8,000."""
_HELD_OUT_EVERY: Final = 4
_MAX_REQUESTS: Final = 8
Result = TypeVar("Result")


def split_data(data: CalibrationData) -> tuple[CalibrationData, CalibrationData]:
    """Divide sequences into those that methods may see, and every fourth one, which are held out to judge them.

    Raises InvalidArgumentError (``too_few_tokens``) for a single sequence.
    """
    if len(data.sequences) < 2:
        raise InvalidArgumentError(
            f"calibration: expected at least 2 sequences, one of them to judge the result, got 1 of {data.num_tokens} "
            "tokens; pass more text, or a larger --calibration-tokens",
            param="calibration",
            code="too_few_tokens",
        )
    places = range(min(_HELD_OUT_EVERY, len(data.sequences)) - 1, len(data.sequences), _HELD_OUT_EVERY)
    held: list[list[int]] = []
    num_tokens = 0
    for place in places:
        if held and num_tokens + len(data.sequences[place]) > MAX_JUDGED_TOKENS:
            break
        held.append(data.sequences[place])
        num_tokens += len(data.sequences[place])
    seen = [ids for place, ids in enumerate(data.sequences) if place not in places]
    return CalibrationData(seen, data.source), CalibrationData(held, data.source)


class Judge:
    """Measures divergences from the original, in its own element type, on sequences that are held out.

    ``seen``: the sequences for the methods.  ``held``: the others.
    """

    def __init__(
        self, source: Path, work: Workspace, threads: int = 0, progress: ProgressCallback | None = None
    ) -> None:
        self._source, self._work, self._threads, self._tell = source, work, threads, progress
        self._reference = work.folder / "reference.f32"
        self._bundle = work.folder / "trial.psm"
        self.seen = self.held = CalibrationData([], "")

    def prepare(self, calibration: Path | None, num_tokens: int) -> None:
        """Read or sample the texts, and compute the original's logits, unless an earlier run did."""
        if calibration is not None:
            check_texts(calibration)
        kept = self._work.read("texts.json")
        if kept is not None and self._reference.is_file():
            self.seen, self.held = (CalibrationData(kept[part], kept["source"]) for part in ("seen", "held"))
            return
        original = self._work.folder / "original.psm"
        original.unlink(missing_ok=True)
        tell = self._tell
        export_bundle(
            self._source,
            original,
            progress=None if tell is None else lambda stage, done, total: tell(Progress(stage, done, total)),
        )
        opened = open_program(original, threads=self._threads, limits=ProgramLimits(max_requests=_MAX_REQUESTS))
        with LLM.of_program(opened) as llm:
            self.seen, self.held = split_data(calibration_data(llm, calibration, num_tokens))
        with LogitsProgram(original, self._max_len, self._threads) as program:
            write_reference(program, self.held.sequences, self._reference)
        original.unlink(missing_ok=True)
        texts = {"seen": self.seen.sequences, "held": self.held.sequences, "source": self.seen.source}
        self._work.write("texts.json", texts)

    @property
    def _max_len(self) -> int:
        return max(map(len, self.held.sequences))

    def divergence(self, checkpoint: Checkpoint | Path) -> MeanDivergence:
        """Return the divergence of a checkpoint."""

        def measure(bundle: Path) -> MeanDivergence:
            with LogitsProgram(bundle, self._max_len, self._threads) as program:
                return measure_divergence(program, self.held.sequences, self._reference)

        return self.look(checkpoint, measure)

    def look(self, checkpoint: Checkpoint | Path, use: Callable[[Path], Result]) -> Result:
        """Return what ``use`` returns for the bundle of a checkpoint, which is removed afterwards."""
        self._bundle.unlink(missing_ok=True)
        try:
            export_bundle(checkpoint, self._bundle)
            return use(self._bundle)
        finally:
            self._bundle.unlink(missing_ok=True)


def check_texts(calibration: Path) -> None:
    """Refuse a file of statistics before the work begins."""
    if is_imatrix(calibration):
        raise InvalidArgumentError(
            f"calibration: expected texts, on which divergence is measured, got the importance matrix {calibration}",
            param="calibration",
        )


def file_stamp(file: Path | None) -> list[Any] | None:
    """Return what tells whether a file is the same one in a later run; None for no file."""
    if file is None or not file.exists():
        return None
    status = file.stat()
    return [str(file.resolve()), status.st_size, status.st_mtime_ns]
