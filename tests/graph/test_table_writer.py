"""Tables have the bytes that the ``flatbuffers`` package writes."""

from __future__ import annotations

import random
from pathlib import Path

import flatbuffers
import pytest

from penstock.core.metadata import read_metadata
from penstock.core.native import Model
from penstock.graph.bundle import read_graph
from penstock.graph.metadata import encode_metadata
from penstock.graph.table_writer import TableWriter

BUNDLES = [Path("demo/demo.psm"), *sorted(Path("tests/golden").glob("*/*.psm"))]


@pytest.mark.parametrize("path", BUNDLES, ids=str)
def test_metadata_of_a_bundle_is_written_again(path: Path) -> None:
    graph, segments = read_graph(path)
    with Model.open(path) as model:
        assert encode_metadata(graph, segments) == bytes(read_metadata(path, model.stamp))


@pytest.mark.parametrize("seed", range(20))
def test_tables_equal_those_of_the_library(seed: int) -> None:
    rng = random.Random(seed)
    writer, builder = TableWriter(), flatbuffers.Builder(0)
    builder.ForceDefaults(True)
    add = {
        "int": builder.PrependInt32Slot, "uint": builder.PrependUint32Slot, "long": builder.PrependInt64Slot,
        "double": builder.PrependFloat64Slot, "offset": builder.PrependUOffsetTRelativeSlot,
    }  # fmt: skip
    tables, expected = [], []
    for _ in range(30):
        text = "\u2581" * rng.randrange(4) + "a" * rng.randrange(9)
        string, other = writer.string(text), builder.CreateString(text)
        numbers = [rng.randrange(-9, 9) for _ in range(rng.randrange(5))]
        ints = writer.ints(numbers)
        builder.StartVector(4, len(numbers), 4)
        for number in reversed(numbers):
            builder.PrependInt32(number)
        vector = builder.EndVector()
        choices = [("int", -1), ("uint", 7), ("long", 1 << 40), ("double", 0.5), None, (string, other), (ints, vector)]
        fields = rng.choices(choices, k=rng.randrange(8))
        tables.append(writer.table(*(f if f is None or isinstance(f[0], str) else f[0] for f in fields)))
        builder.StartObject(len(fields))
        for slot, field in enumerate(fields):
            if field is not None:
                kind, value = field if isinstance(field[0], str) else ("offset", field[1])
                add[kind](slot, value, 0)
        expected.append(builder.EndObject())
    root = writer.table(writer.offsets(tables))
    builder.StartVector(4, len(expected), 4)
    for table in reversed(expected):
        builder.PrependUOffsetTRelative(table)
    vector = builder.EndVector()
    builder.StartObject(1)
    builder.PrependUOffsetTRelativeSlot(0, vector, 0)
    builder.Finish(builder.EndObject(), file_identifier=b"TEST")
    assert writer.finish(root, b"TEST") == bytes(builder.Output())
