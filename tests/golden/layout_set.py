"""Golden files of the newest layouts of weights: a bundle that has them all, and folders with rotated schemes.

    python -m tests.golden.layout_set 1.0

makes a set, once.  ``layouts.psm`` is a network without attention whose linears have random blocks of NVFP4, of the
layouts of 1 and 2 bits, and rotated weights of 8 and 4 bits, with their scales.  The folders are a Llama of one layer.
``expected.json`` has the checksums of logits, which are the same on every instruction level.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.core import native
from penstock.graph.bundle import BundleWriter
from penstock.graph.export import export_bundle
from penstock.graph.ir import Graph, Layout, Operand
from penstock.models.mapped import open_mapped
from penstock.quant.scheme import find_scheme
from tests.support.gguf_blocks import random_blocks
from tests.support.invariant_checkpoints import write_checkpoint
from tests.support.tiny_graph import Builder, R, T, c, tiny_values, value

__all__ = ["FOLDER", "SCHEMES", "crc_of_bundle", "crc_of_folder", "layout_graph"]

FOLDER: Final = Path(__file__).parent / "layouts"
BLOCKS: Final = ("nvfp4", "tq2_0", "tq1_0", "q2_0", "q1_0")
ROTATED: Final = ("w8a8_h32", "w4a8_h32")
SCHEMES: Final = BLOCKS + ROTATED
COLS, ROWS, VOCAB = 256, 8, 8
NUM_IDS: Final = 24


def layout_graph() -> Graph:
    """An embedding, a linear in each scheme, the sum of their outputs, and a head in float32."""
    b = Builder("nvfp4", [0])
    x = b.value("hidden", T, c(COLS))
    b.node("embedding", "embed", [value("token_ids"), b.weight("embed.weight", VOCAB, COLS)], [x], dim=COLS)
    total = ""
    for scheme in SCHEMES:
        weight = b.weight(f"{scheme}.weight", ROWS, COLS, Layout(find_scheme(scheme).layout))
        y = b.value(f"{scheme}.y", T, c(ROWS))
        b.node("linear", scheme, [value(x), weight, Operand("none")], [y], out_features=ROWS, scheme=scheme)
        if total:
            both = b.value(f"{scheme}.sum", T, c(ROWS))
            b.node("add", f"{scheme}.sum", [value(total), value(y)], [both])
        total = both if total else y
    last = b.value("last", R, c(ROWS))
    b.node("gather_rows", "gather", [value(total), value("output_rows")], [last])
    b.graph.output = b.value("logits", R, c(VOCAB))
    head = b.weight("head.weight", VOCAB, ROWS, Layout.T16_F32)
    b.node("linear", "head", [value(last), head, Operand("none")], ["logits"], out_features=VOCAB, scheme="f32")
    b.graph.vocab_size = VOCAB
    return b.graph


def write_layouts(path: Path) -> None:
    """Write the bundle, with random weights."""
    graph = layout_graph()
    floats = tiny_values(graph)
    segments = {"config.json": b"{}"}
    with native.Context(1) as context, BundleWriter(path, graph, segments) as writer:
        for weight in graph.weights.values():
            data = np.zeros(native.layout_bytes(weight.layout, weight.rows, weight.cols), np.uint8)
            scheme = weight.name.removesuffix(".weight")
            size = weight.layout, weight.rows, weight.cols, 0, weight.rows
            if scheme in BLOCKS:
                context.pack_blocks(*size, random_blocks(scheme, weight.rows, weight.cols), data)
            else:
                context.pack(*size, 1, floats[weight.name], data)
            writer.add_weight(weight.name, data)


def logits_of(path: Path, cpu_level: str | None = None) -> npt.NDArray[np.float32]:
    """Return the logits of each of 24 tokens; keys and values are float32, in two pages."""
    ids = (np.arange(NUM_IDS, dtype=np.int32) * 3) % VOCAB
    with native.Model.open(path, verify=True) as model, native.Context(2, cpu_level) as context:
        options = native.ProgramOptions(max_tokens=NUM_IDS, max_requests=1, max_rows=NUM_IDS, num_pages=2)
        with native.CoreProgram(model, context, options) as program:
            program.run(
                native.StepBatch(
                    token_ids=ids,
                    positions=np.arange(NUM_IDS, dtype=np.int32),
                    request_starts=np.array([0, NUM_IDS], np.int32),
                    page_tables=np.array([[[0, 1]]], np.int32),
                    output_rows=np.arange(NUM_IDS, dtype=np.int32),
                )
            )
            return program.logits().copy()


def crc_of_bundle(path: Path, cpu_level: str | None = None) -> int:
    """Return the checksum of the logits of a bundle."""
    return zlib.crc32(logits_of(path, cpu_level).tobytes())


def crc_of_folder(folder: Path, bundle: Path, cpu_level: str | None = None) -> int:
    """Return the checksum of the logits of a folder, which is exported to ``bundle`` first, if that is missing."""
    if not bundle.exists():
        export_bundle(folder, bundle)
    return crc_of_bundle(bundle, cpu_level)


def main() -> None:
    target = FOLDER / sys.argv[1]
    target.mkdir(parents=True)  # a set that is there stays as it is
    write_layouts(target / "layouts.psm")
    expected = {"layouts": crc_of_bundle(target / "layouts.psm")}
    with tempfile.TemporaryDirectory() as name:
        source = write_checkpoint(
            Path(name) / "model", vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True, max_position_embeddings=256,
        )  # fmt: skip
        for scheme in ROTATED:
            quantize_checkpoint(open_mapped(source), target / scheme, scheme)
            expected[scheme] = crc_of_folder(target / scheme, Path(name) / f"{scheme}.psm")
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
