"""Name the types of files by what is in them.

    pip install 'penstock[onnx]'
    pip install --no-deps magika
    python examples/networks/name_files.py FILE...

The network is Magika (Apache-2.0), which the package magika 1.0.3 carries as an ONNX file with the names of its types.
It reads the first and the last bytes of a file, without the space around them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from common import open_network, package_file
from numpy.typing import NDArray

import penstock

FOLDER = "models/standard_v3_3"


def features(data: bytes, config: dict[str, Any]) -> NDArray[np.int32]:
    """Return the bytes of a file that the network reads, and the padding token where it has fewer."""
    block, padding = config["block_size"], config["padding_token"]
    head = data[:block].lstrip()[: config["beg_size"]]
    tail = data[-block:].rstrip()[-config["end_size"] :]
    row = np.full(config["beg_size"] + config["end_size"], padding, np.int32)
    row[: len(head)] = list(head)
    row[len(row) - len(tail) :] = list(tail)
    return row


def name(network: penstock.Predictor, config: dict[str, Any], files: list[bytes]) -> list[tuple[str, float]]:
    """Return the type of each file, and its probability."""
    (scores,) = network.run([np.stack([features(data, config) for data in files])])
    types = config["target_labels_space"]
    return [(types[best], float(row[best])) for row in scores for best in [int(row.argmax())]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Name the types of files by what is in them.")
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--network", metavar="NET", help="an ONNX file or a bundle (default: the package's)")
    parser.add_argument("--config", metavar="FILE", help="its config.min.json (default: the package's)")
    args = parser.parse_args()
    network = open_network(args.network or package_file("magika", f"{FOLDER}/model.onnx"))
    config = json.loads(Path(args.config or package_file("magika", f"{FOLDER}/config.min.json")).read_text())
    args.files = [file for file in args.files if Path(file).is_file()]
    if not args.files:
        raise SystemExit("expected files, got none")
    found = name(network, config, [Path(file).read_bytes() for file in args.files])
    for file, (kind, probability) in zip(args.files, found, strict=True):
        print(f"{probability:.2f} {kind:12} {file}")


if __name__ == "__main__":
    main()
