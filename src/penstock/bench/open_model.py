"""What bench and profile measure: a model opened in graph mode, and sizes that are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.errors import UnsupportedError
from penstock.graph.bundle import read_graph
from penstock.graph.ir import Graph
from penstock.runtime.native import NativeProgram
from penstock.runtime.open import Opened, OpenOptions, open_program
from penstock.runtime.program import MAX_REQUESTS, ProgramLimits
from penstock.validation import given_number, whole

__all__ = ["OpenModel", "check_size", "open_model"]

MAX_SIZE: Final = 1 << 20


class OpenModel(Protocol):
    """Which model, and how it runs."""

    @property
    def model(self) -> Path | str:
        """A bundle or a folder."""

    @property
    def scheme(self) -> str | None:
        """For a folder."""

    @property
    def threads(self) -> int:
        """0: as many as the machine allows."""

    @property
    def network(self) -> str | None:
        """A network script of one's own, for a folder."""

    @property
    def verify(self) -> str:
        """When to verify a bundle's checksums."""


def check_size(name: str, value: object, least: int = 1) -> None:
    """InvalidArgumentError unless it is a whole number from ``least`` to 2**20; of ``batch``, to MAX_REQUESTS."""
    given_number(name, whole(name, value, least, MAX_REQUESTS if name == "batch" else MAX_SIZE))


@contextmanager
def open_model(
    what: OpenModel, limits: ProgramLimits, name: str, progress: Callable[[Any], None] | None
) -> Iterator[tuple[Opened, NativeProgram, Graph]]:
    """The model, its program and its graph, closed at the end; UnsupportedError where ``name`` cannot measure it."""
    opened = open_program(
        what.model,
        scheme=what.scheme,
        threads=what.threads,
        limits=limits,
        network=what.network,
        options=OpenOptions(progress=progress, verify=what.verify),
    )
    try:
        if not isinstance(opened.program, NativeProgram) or opened.bundle is None:
            raise UnsupportedError(f"{name} measures graph mode")
        yield opened, opened.program, read_graph(opened.bundle)[0]
    finally:
        opened.program.close()
