"""Opens a model in graph mode for a measurement, and checks sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.checkpoint.folder import Checkpoint
from penstock.config import check_integer
from penstock.errors import UnsupportedError
from penstock.file_kinds import is_gguf
from penstock.graph.bundle import read_graph
from penstock.graph.ir import Graph
from penstock.runtime.native import NativeProgram
from penstock.runtime.open import Opened, OpenOptions, open_program
from penstock.runtime.program import MAX_REQUESTS, ProgramLimits
from penstock.runtime.ranks.stage_server import StageServer

__all__ = ["BenchModel", "StoredWeights", "check_size", "describe_threads", "open_model", "stored_weights"]

MAX_SIZE: Final = 1 << 20


@dataclass(frozen=True)
class BenchModel:
    """The model to measure and how to open it.

    ``model``: a bundle or a checkpoint folder.  ``scheme`` (None is that of the checkpoint) and ``network`` (the user's
    script) are for a folder.  ``threads``: 0 is all allowed cores.  ``verify``: when to verify a bundle's checksums.
    ``tensor_parallel_size``: processes that each layer is divided over; ``pipeline_parallel_size``: stages that the
    layers are divided into; ``context_parallel_size``: processes that each context is divided over; ``threads`` is
    then per process.  ``stage_server``: where the stages of other machines join, which have threads of their own.
    """

    model: Path | str
    _: KW_ONLY
    scheme: str | None = None
    threads: int = 0
    network: str | None = None
    verify: str = "once"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    stage_server: StageServer | None = None

    def open(self, limits: ProgramLimits, progress: Callable[[Any], None] | None = None) -> Opened:
        """Open the model with memory for ``limits``."""
        options = OpenOptions(
            progress=progress,
            verify=self.verify,
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            context_parallel_size=self.context_parallel_size,
            stage_server=self.stage_server,
        )
        return open_program(
            self.model, scheme=self.scheme, threads=self.threads, limits=limits, network=self.network, options=options
        )


def check_size(name: str, value: object, minimum: int = 1) -> None:
    """Raise InvalidArgumentError unless it is an integer from ``minimum`` to 2**20 (``batch``: to MAX_REQUESTS)."""
    check_integer(name, value, minimum, MAX_REQUESTS if name == "batch" else MAX_SIZE)


def describe_threads(num_threads: int, num_ranks: int = 1) -> str:
    """Return the threads that compute, in words; ``num_threads`` are those of each rank."""
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    return threads if num_ranks == 1 else f"{num_ranks} ranks of {threads}"


class StoredWeights(NamedTuple):
    """The weights of a model: their number, and for a GGUF file their bytes and ``share``, those of the file by those
    of memory; 0 and 1 for other models."""

    num_values: int
    num_bytes: int
    share: float


def stored_weights(model: Path | str, graph: Graph) -> StoredWeights:
    """Return the weights of an open model; figures of a GGUF file count the bytes of its tensors."""
    weights = graph.weights.values()
    num_values = sum(weight.rows * weight.cols for weight in weights)
    if not is_gguf(Path(model)):
        return StoredWeights(num_values, 0, 1.0)
    checkpoint, in_file, in_memory = Checkpoint.open(Path(model)), 0, 0
    for weight in weights:
        names = [part.name for part in weight.parts]
        if weight.rows > 1 and all(name in checkpoint.tensors for name in names):
            in_file += sum(checkpoint.file_bytes(name) for name in names)
            in_memory += weight.num_bytes
    total = sum(map(checkpoint.file_bytes, checkpoint.tensors))
    return StoredWeights(num_values, total, in_file / in_memory if in_memory else 1.0)


@contextmanager
def open_model(
    settings: BenchModel, limits: ProgramLimits, name: str, progress: Callable[[Any], None] | None
) -> Iterator[tuple[Opened, NativeProgram, Graph]]:
    """Yield an open model, its program and its graph; UnsupportedError if ``name`` cannot measure it."""
    opened = settings.open(limits, progress)
    try:
        if not isinstance(opened.program, NativeProgram) or opened.bundle is None:
            raise UnsupportedError(f"{name} supports graph mode only")
        if opened.bundle.is_dir():
            raise UnsupportedError(
                f"{name}: expected a whole bundle or checkpoint folder, got {settings.model}, which is cut for ranks",
                param="model",
            )
        for note in opened.notes if progress is not None else ():
            print(f"penstock: {note}", file=sys.stderr, flush=True)
        yield opened, opened.program, read_graph(opened.bundle)[0]
    finally:
        opened.program.close()
