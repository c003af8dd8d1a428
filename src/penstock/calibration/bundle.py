"""The bundle that calibration runs: int8 weights with 16-bit inputs, nearly those of the original, at full speed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from penstock.llm.llm import LLM
from penstock.runtime.build import ProgressCallback, build_in_child
from penstock.runtime.open import open_program
from penstock.runtime.program import ProgramLimits
from penstock.runtime.temporary_folder import temporary_folder

__all__ = ["SCHEME", "open_calibrated"]

SCHEME: Final = "w8a16"
_MAX_REQUESTS: Final = 8


@contextlib.contextmanager
def open_calibrated(
    source: Path, threads: int = 0, progress: ProgressCallback | None = None
) -> Iterator[tuple[Path, LLM]]:
    """Yield a temporary bundle of a checkpoint, and the LLM that encodes and samples texts with it."""
    with temporary_folder(source) as folder:
        bundle = Path(folder) / "calibrated.psm"
        build_in_child(source, bundle, scheme=SCHEME, kind="cached", progress=progress)
        limits = ProgramLimits(max_requests=_MAX_REQUESTS)
        opened = open_program(bundle, threads=threads, limits=limits)
        with LLM.of_program(opened) as llm:
            yield bundle, llm
