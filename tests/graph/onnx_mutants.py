"""Damages ONNX files and reads them, within bounds of time and memory for each.

    python -m tests.graph.onnx_mutants --seconds 600

The seeds are the small models of onnx's own node tests.  A mutant is refused with an error of Penstock, or read; any
other exception, a read that takes longer, and one that takes more memory is printed with its seed.  The exit status is
1 if there is one.
"""

from __future__ import annotations

import argparse
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from onnx import ModelProto

from penstock.errors import PenstockError
from penstock.graph.onnx.reader import read_onnx

MAX_SECONDS: Final = 20
MAX_BYTES: Final = 4 << 30
NUMBERS: Final = (-1, 0, 1, 2, 7, 1 << 31, (1 << 31) - 1, -(1 << 31), (1 << 62), -(1 << 63), (1 << 63) - 1)


@dataclass
class Outcome:
    """How many mutants were read and refused, and what else happened."""

    read: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of mutants."""
        return self.read + self.refused + len(self.wrong)


def seeds() -> list[bytes]:
    """Return the models of onnx's node tests, serialized, up to 64 KiB each."""
    from onnx.backend.test.loader import load_model_tests

    models = [case.model for case in load_model_tests(kind="node") if case.model is not None]
    files = {model.SerializeToString() for model in models}
    return sorted(file for file in files if len(file) <= 1 << 16)


def _bytes_changed(data: bytes, rng: np.random.Generator) -> bytes:
    damaged = bytearray(data)
    for _ in range(int(rng.integers(1, 6))):
        at = int(rng.integers(len(damaged)))
        kind = int(rng.integers(4))
        if kind == 0:
            damaged[at] = int(rng.integers(256))
        elif kind == 1:
            damaged[at] ^= 1 << int(rng.integers(8))
        elif kind == 2:
            del damaged[at : at + int(rng.integers(1, 9))]
        else:
            damaged[at:at] = rng.bytes(int(rng.integers(1, 9)))
        if not damaged:
            return b""
    return bytes(damaged)


def _parts_changed(data: bytes, other: bytes, rng: np.random.Generator) -> bytes:
    """Change attributes, sizes, names, element types and nodes, so that the file still parses."""
    model = ModelProto.FromString(data)
    graph = model.graph
    for _ in range(int(rng.integers(1, 4))):
        node: Any = graph.node[int(rng.integers(len(graph.node)))] if graph.node else None
        kind = int(rng.integers(8))
        number = NUMBERS[int(rng.integers(len(NUMBERS)))]
        if kind == 0 and node is not None and node.attribute:
            attribute = node.attribute[int(rng.integers(len(node.attribute)))]
            attribute.i, attribute.f = number, float(number)
            attribute.ints[:] = [number] * int(rng.integers(0, 5))
        elif kind == 1 and graph.input:
            shape = graph.input[int(rng.integers(len(graph.input)))].type.tensor_type.shape
            for dim in shape.dim:
                if rng.integers(2):
                    dim.dim_value = number
        elif kind == 2 and node is not None and node.input:
            node.input[int(rng.integers(len(node.input)))] = graph.input[0].name if graph.input else ""
        elif kind == 3 and graph.initializer:
            tensor = graph.initializer[int(rng.integers(len(graph.initializer)))]
            tensor.dims[:] = [number] * int(rng.integers(0, 4))
        elif kind == 4 and node is not None:
            node.op_type = str(
                rng.choice([item.op_type for item in ModelProto.FromString(other).graph.node] or ["Add"])
            )
        elif kind == 5 and graph.input:
            graph.input[int(rng.integers(len(graph.input)))].type.tensor_type.elem_type = int(rng.integers(0, 30))
        elif kind == 6 and node is not None:
            graph.node.add().CopyFrom(node)
        elif model.opset_import:
            model.opset_import[0].version = int(rng.integers(1, 30))
    return bytes(model.SerializeToString())


def mutants(files: list[bytes], seed: int) -> Iterator[bytes]:
    """Yield damaged files without end; equal seeds give equal files."""
    rng = np.random.default_rng(seed)
    while True:
        data, other = (files[int(rng.integers(len(files)))] for _ in range(2))
        try:
            yield _bytes_changed(data, rng) if rng.integers(3) == 0 else _parts_changed(data, other, rng)
        except (ValueError, TypeError):  # a number that the field has no room for
            continue


class SlowReadError(BaseException):
    """A mutant took too long."""


def _stop(*_: Any) -> None:
    raise SlowReadError


def run(seconds: float, seed: int = 0, most: int = 0) -> Outcome:
    """Read mutants for as many seconds of processor time, or ``most``.  Memory and the time of each are bounded."""
    outcome, files = Outcome(), seeds()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGVTALRM, _stop)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES if limits[1] < 0 else min(MAX_BYTES, limits[1]), limits[1]))
    start = time.process_time()
    try:
        for at, data in enumerate(mutants(files, seed)):
            if time.process_time() - start > seconds or (most and at == most):
                return outcome
            signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS)
            try:
                read_onnx(data)
                outcome.read += 1
            except PenstockError:
                outcome.refused += 1
            except (Exception, SlowReadError) as error:
                places = [frame.name for frame in traceback.extract_tb(error.__traceback__)[-4:]]
                outcome.wrong.append(f"{seed}:{at}: {type(error).__name__}: {error!s:.200} ({', '.join(places)})")
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return outcome
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGVTALRM, before)


def main() -> None:
    parser = argparse.ArgumentParser(description="Read damaged ONNX files.")
    parser.add_argument("--seconds", type=float, default=600, help="of processor time (default: 600)")
    parser.add_argument("--seed", type=int, default=0, help="of the mutants (default: 0)")
    parser.add_argument("--most", type=int, default=0, help="mutants; 0: no limit (default: 0)")
    args = parser.parse_args()
    outcome = run(args.seconds, args.seed, args.most)
    print("\n".join(outcome.wrong))
    print(f"{outcome.count} mutants: {outcome.read} read, {outcome.refused} refused, {len(outcome.wrong)} wrong")
    sys.exit(1 if outcome.wrong else 0)


if __name__ == "__main__":
    main()
