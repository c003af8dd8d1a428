"""Bundles of general networks that earlier releases wrote, and what they answered.

    python -m tests.golden.network_set 1.1
    python -m tests.golden.network_set 1.1-int8 int8
    python -m tests.golden.network_set 1.1-winograd winograd

make sets, once, under the version of the format.  ``images`` has the ops of images and of elements, ``sequences``
those of attention, of recurrent layers and of indices, ``int8`` those of int8 networks, and ``winograd`` has
``conv_winograd``; all have random weights and free sizes.  ``expected.json`` has the shape and the checksum of each
output, which are the same on every instruction level.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypedDict

import numpy as np
import numpy.typing as npt

from penstock.core import native
from penstock.graph.bundle import read_graph
from penstock.networks.int8.quantize import quantize_network
from penstock.networks.predictor import Predictor, open_predictor
from tests.support.general_graphs import winograd_network

__all__ = ["FOLDER", "SIZES", "NetworkAnswer", "answers_of", "arrays_of"]

FOLDER: Final = Path(__file__).parent / "networks"
SIZES: Final[dict[str, Sequence[dict[str, int]]]] = {
    "images": ({"B": 1, "H_8": 2, "W_8": 3}, {"B": 3, "H_8": 3, "W_8": 2}),
    "int8": ({"B": 1, "H_8": 2, "W_8": 3}, {"B": 3, "H_8": 3, "W_8": 2}),
    "sequences": ({"B": 2, "S": 5}, {"B": 1, "S": 11}),
    "winograd": ({"N": 1, "H": 1, "W": 3}, {"N": 3, "H": 9, "W": 32}),
}


class NetworkAnswer(TypedDict):
    """An output of a run."""

    shape: list[int]
    crc32: int


def arrays_of(predictor: Predictor, sizes: dict[str, int]) -> list[npt.NDArray[Any]]:
    """Return the inputs of a run: a fixed function of the place, as generators of random numbers may change."""
    arrays: list[npt.NDArray[Any]] = []
    for value in predictor.inputs:
        shape = predictor.shape_of(value, sizes)
        places = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape) * 7919 % 251
        is_id = value.name == "ids"
        arrays.append(places % 40 if is_id else ((places - 125) / 64).astype(np.float32))
    return arrays


def answers_of(path: Path, cpu_level: str | None = None) -> list[list[NetworkAnswer]]:
    """Return the outputs for each set of sizes."""
    with native.Model.open(path, verify=True) as model, native.Context(2, cpu_level) as context:
        predictor = Predictor(model, context, {})
        runs = [predictor.run(arrays_of(predictor, sizes)) for sizes in SIZES[path.stem]]
        predictor.close()
    return [
        [{"shape": list(array.shape), "crc32": zlib.crc32(np.ascontiguousarray(array).tobytes())} for array in arrays]
        for arrays in runs
    ]


def write_int8(path: Path) -> None:
    """Write ``images`` of the set 1.1 with int8 convolutions and linears."""
    source = FOLDER / "1.1" / "images.psm"
    with tempfile.TemporaryDirectory() as folder, open_predictor(source) as predictor:
        for number, sizes in enumerate(SIZES["images"]):
            np.save(Path(folder) / f"{number}.npy", arrays_of(predictor, sizes)[0])
        quantize_network(source, path, folder)


def main() -> None:
    target, kind = FOLDER / sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    target.mkdir(parents=True)  # a set that is there stays as it is
    makers: dict[str, Any] = {"int8": write_int8} if kind == "int8" else {"winograd": winograd_network().write}
    if not kind:
        from tests.golden.network_modules import capture_all  # only making these needs PyTorch

        makers = {name: network.save for name, network in capture_all().items()}
    expected = {}
    for name, make in makers.items():
        path = target / f"{name}.psm"
        make(path)
        expected[name] = answers_of(path)
        print(name, path.stat().st_size, sorted({node.op for node in read_graph(path)[0].nodes}))
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
