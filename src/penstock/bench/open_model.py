"""Opens a model in graph mode for a measurement, and checks sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.config import check_integer
from penstock.errors import UnsupportedError
from penstock.graph.bundle import read_graph
from penstock.graph.ir import Graph
from penstock.runtime.native import NativeProgram
from penstock.runtime.open import Opened, OpenOptions, open_program
from penstock.runtime.program import MAX_REQUESTS, ProgramLimits

__all__ = ["OpenModel", "check_size", "open_model"]

MAX_SIZE: Final = 1 << 20


class OpenModel(Protocol):
    """The model to measure and how to open it."""

    @property
    def model(self) -> Path | str:
        """A bundle or a checkpoint folder."""

    @property
    def scheme(self) -> str | None:
        """The number format of weights, for a checkpoint folder; None is that of the checkpoint."""

    @property
    def threads(self) -> int:
        """The number of threads; 0 is all allowed cores."""

    @property
    def network(self) -> str | None:
        """The user's network script, for a checkpoint folder."""

    @property
    def verify(self) -> str:
        """When to verify a bundle's checksums: "once", "always" or "never"."""


def check_size(name: str, value: object, minimum: int = 1) -> None:
    """Raise InvalidArgumentError unless it is an integer from ``minimum`` to 2**20 (``batch``: to MAX_REQUESTS)."""
    check_integer(name, value, minimum, MAX_REQUESTS if name == "batch" else MAX_SIZE)


@contextmanager
def open_model(
    settings: OpenModel, limits: ProgramLimits, name: str, progress: Callable[[Any], None] | None
) -> Iterator[tuple[Opened, NativeProgram, Graph]]:
    """Yield an open model, its program and its graph; UnsupportedError if ``name`` cannot measure it."""
    opened = open_program(
        settings.model,
        scheme=settings.scheme,
        threads=settings.threads,
        limits=limits,
        network=settings.network,
        options=OpenOptions(progress=progress, verify=settings.verify),
    )
    try:
        if not isinstance(opened.program, NativeProgram) or opened.bundle is None:
            raise UnsupportedError(f"{name} supports graph mode only")
        yield opened, opened.program, read_graph(opened.bundle)[0]
    finally:
        opened.program.close()
