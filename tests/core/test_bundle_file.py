"""The file: what is written is read again, what is damaged is refused by name."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.native import Model, crc32
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.graph.bundle import BundleWriter, read_graph
from penstock.graph.inspect import describe
from penstock.graph.ir import Graph
from tests.support.errors import raises
from tests.support.tiny_graph import tiny_graph, write_bundle
from tests.system_packages import skip_reason

SCHEMA = Path(__file__).parents[2] / "core" / "bundle.fbs"


def test_graph_survives_write_and_read(bundle_of: Callable[..., Path]) -> None:
    graph, segments = read_graph(bundle_of("w4a8", (0, 32)))
    expected = tiny_graph("w4a8", windows=(0, 32))
    for name, weight in graph.weights.items():
        expected.weights[name].offset, expected.weights[name].num_bytes = weight.offset, weight.num_bytes
    assert graph == expected
    assert [segment.name for segment in segments] == ["weights", "config.json"]


def test_pipes_and_folders_are_refused_as_bundles(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.psm")
    for path in (tmp_path / "pipe.psm", tmp_path):
        with pytest.raises(FileAccessError, match="regular file"):
            Model.open(path)


def test_same_input_gives_same_bytes(tmp_path: Path) -> None:
    files = [write_bundle(tmp_path / name, tiny_graph("w8a8")).read_bytes() for name in ("a.psm", "b.psm")]
    assert files[0] == files[1]


def test_segments_and_info_are_served(bundle_of: Callable[..., Path]) -> None:
    path = bundle_of("w8a8", (0, 32))
    for mmap in (True, False):
        with Model.open(path, verify=True, mmap=mmap) as model:
            segment = model.segment("config.json")
            assert segment is not None
            assert bytes(segment) == b"{}"
            assert segment.readonly
            assert model.segment("absent") is None
            info = model.info
            assert (info.network, info.scheme, info.vocab_size, info.context_len) == ("tiny", "w8a8", 101, 256)
            assert info.page_windows == (0, 32)
            assert info.file_bytes == path.stat().st_size


def test_bytes_per_token_count_one_row_of_the_table(bundle_of: Callable[..., Path]) -> None:
    graph, _ = read_graph(bundle_of())
    table = graph.weights["embed.weight"]
    with Model.open(bundle_of()) as model:
        others = model.info.weight_bytes - table.num_bytes
        assert model.info.weight_bytes_per_token == others + table.num_bytes // table.rows


def test_describe_adds_up(bundle_of: Callable[..., Path]) -> None:
    told = describe(bundle_of("w4a8"), verify=True)
    assert sum(told["bytes_by_part"].values()) == sum(told["bytes_by_layout"].values()) == told["weight_bytes"]
    assert told["ops"]["attention"] == 2
    assert json.loads(json.dumps(told)) == told


def flatc_json(bundle: Path, folder: Path) -> dict[str, Any]:
    header = bundle.read_bytes()[:64]
    offset, size = struct.unpack("<QQ", header[16:32])
    (folder / "metadata.bin").write_bytes(bundle.read_bytes()[offset : offset + size])
    command = ["flatc", "--json", "--strict-json", "--defaults-json", "-o", str(folder), str(SCHEMA), "--"]
    subprocess.run([*command, str(folder / "metadata.bin")], check=True, capture_output=True)
    loaded: dict[str, Any] = json.loads((folder / "metadata.json").read_text())
    return loaded


@pytest.mark.skipif(bool(skip_reason("flatc")), reason=skip_reason("flatc"))
def test_flatc_reads_what_was_written(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    graph, segments = read_graph(bundle_of("w4a8", (0, 32)))
    found = flatc_json(bundle_of("w4a8", (0, 32)), tmp_path)
    assert found["network"] == graph.network
    assert found["scheme"] == graph.scheme
    assert [v["name"] for v in found["values"]] == list(graph.values)
    names = list(graph.values)
    for stored, value in zip(found["values"], graph.values.values(), strict=True):
        assert stored["dtype"] == value.dtype
        assert stored["base"] == (-1 if value.base is None else names.index(value.base))
        assert stored["offset"] == value.offset
        for stored_dim, dim in zip(stored["shape"], value.shape, strict=True):
            symbols = [symbol.name for symbol in graph.symbols]
            symbol = -1 if dim.symbol is None else symbols.index(dim.symbol)
            assert stored_dim == {"symbol": symbol, "factor": dim.factor, "offset": dim.offset}
    for stored, weight in zip(found["weights"], graph.weights.values(), strict=True):
        keys = ("name", "rows", "cols", "layout", "offset", "bytes")
        wanted = (weight.name, weight.rows, weight.cols, weight.layout, weight.offset, weight.num_bytes)
        assert tuple(stored[key] for key in keys) == wanted
        assert [part["name"] for part in stored["parts"]] == [part.name for part in weight.parts]
    for stored, node in zip(found["nodes"], graph.nodes, strict=True):
        assert found["ops"][stored["op"]] == {"name": node.op, "version": 1}
        assert [names[i] for i in stored["outputs"]] == node.outputs
        assert [("none", "value", "weight", "state")[o["kind"]] for o in stored["inputs"]] == [
            o.kind for o in node.inputs
        ]
        for attr in stored["attrs"]:
            found_value, wanted_value = (None, attr["i"], attr["f"], attr["s"])[attr["type"]], node.attrs[attr["name"]]
            exact = isinstance(wanted_value, str)
            assert found_value == (wanted_value if exact else pytest.approx(wanted_value))  # flatc prints 12 digits
    assert [(s["name"], s["bytes"], s["crc32"]) for s in found["segments"]] == [
        (s.name, s.num_bytes, s.crc32) for s in segments
    ]
    assert found["states"][1]["group"] == 1
    assert [g["window"] for g in found["page_groups"]] == [0, 32]
    assert names[found["output"]] == graph.output


# ---- damage


def damaged(bundle: Path, folder: Path, change: Callable[[bytearray], None]) -> Path:
    data = bytearray(bundle.read_bytes())
    change(data)
    path = folder / "damaged.psm"
    path.write_bytes(data)
    return path


def put(offset: int, fmt: str, value: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into(fmt, data, offset, value)


HEADER_DAMAGE = {
    "magic": (put(0, "<B", 0), InvalidFileError, "header.magic"),
    "newer_major": (
        put(8, "<H", 2),
        UnsupportedError,
        "header.major: .* format 1, the file has format 2",
    ),
    "features": (put(36, "<I", 4), UnsupportedError, "header.required_features: .* 0x4"),
    "header_bytes": (put(12, "<I", 128), InvalidFileError, "header.header_bytes"),
    "metadata_offset": (put(16, "<Q", 128), InvalidFileError, "header.metadata_offset"),
    "metadata_bytes": (put(24, "<Q", 1 << 62), InvalidFileError, "header.metadata_bytes"),
    "metadata_crc": (put(32, "<I", 1), InvalidFileError, "header.metadata_crc32"),
    "file_bytes": (put(40, "<Q", 64), InvalidFileError, "header.file_bytes"),
    "padding": (put(63, "<B", 1), InvalidFileError, "header.padding"),
}


@pytest.mark.parametrize("name", HEADER_DAMAGE)
def test_damaged_header_is_refused_by_field(name: str, bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    change, error, message = HEADER_DAMAGE[name]
    path = damaged(bundle_of(), tmp_path, change)
    with raises(error, param=message.partition(":")[0], match=f"{path}: {message}"):
        Model.open(path)


def test_newer_minor_is_read(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    path = damaged(bundle_of(), tmp_path, put(10, "<H", 9))
    with pytest.warns(UserWarning, match=rf"{path}: header\.minor: the file has format 1\.9, this"):
        Model.open(path).close()


def test_every_truncation_and_addition_is_refused(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    whole = bundle_of().read_bytes()
    path = tmp_path / "cut.psm"
    for size in [*range(130), *range(130, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with raises(InvalidFileError, match=str(path)):
            Model.open(path)
    path.write_bytes(whole + b"\0")
    with raises(InvalidFileError, match=r"header\.file_bytes"):
        Model.open(path)


def test_verify_finds_every_flipped_byte(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    whole = bundle_of().read_bytes()
    path = tmp_path / "flipped.psm"
    for at in range(48, len(whole), 131):
        data = bytearray(whole)
        data[at] ^= 0x10
        path.write_bytes(data)
        with raises(InvalidFileError, match=str(path)):
            Model.open(path, verify=True)


def test_file_that_is_not_there_or_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileAccessError, match="No such file"):
        Model.open(tmp_path / "absent.psm")
    with pytest.raises(FileAccessError, match="regular file"):
        Model.open(tmp_path)


# ---- the writer


def test_a_segment_may_be_made_late(tmp_path: Path) -> None:
    graph, sizes = tiny_graph(), list[int]()

    def late() -> bytes:
        (part,) = tmp_path.glob(".late.psm.*")
        sizes.append(part.stat().st_size)
        return b"made late"

    early = write_bundle(tmp_path / "early.psm", graph, segments={"a": b"made late", "b": b"{}"})
    path = write_bundle(tmp_path / "late.psm", graph, segments={"a": late, "b": b"{}"})
    with Model.open(path, verify=True) as model:
        assert bytes(model.segment("a") or b"") == b"made late"
    assert path.read_bytes() == early.read_bytes()
    assert sizes[0] > sum(weight.num_bytes for weight in read_graph(path)[0].weights.values())  # they were there


def test_writer_leaves_nothing_on_error(tmp_path: Path) -> None:
    path = tmp_path / "x.psm"
    graph = tiny_graph()
    name = next(iter(graph.weights))
    with (
        raises(InvalidArgumentError, param="data", match=r"12928 bytes .* rows_f32 \[101, 32\]"),
        BundleWriter(path, graph) as w,
    ):
        w.add_weight(name, b"short")
    with (
        raises(InvalidArgumentError, param="name", match=f"expected {name!r}, got 'other'"),
        BundleWriter(path, graph) as w,
    ):
        w.add_weight("other", b"")
    with raises(InvalidArgumentError, param="embed.weight"), BundleWriter(path, graph):
        pass
    graph.context_len = 0
    with raises(InvalidFileError, match=f"^{path}: .*context_len"):  # not the name that it had meanwhile
        write_bundle(path, graph)
    assert list(tmp_path.iterdir()) == []


def test_writer_leaves_nothing_if_a_segment_fails(tmp_path: Path) -> None:
    """A segment is made when the writer is closed, here without a with statement."""

    def fail() -> bytes:
        raise InvalidFileError("tokenizer.json: expected a vocabulary, got none", param="tokenizer")

    writer = BundleWriter(tmp_path / "x.psm", tiny_graph(), {"a": fail})
    writer.leave_weights(0)
    with raises(InvalidFileError, param="tokenizer"):
        writer.close()
    assert list(tmp_path.iterdir()) == []
    writer.close()


def test_writer_keeps_the_old_file_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_bundle(tmp_path / "x.psm", tiny_graph())
    before = path.read_bytes()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(FileAccessError, match="No space left"):
        write_bundle(path, tiny_graph("w8a8"))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_writer_refuses_a_graph_that_the_core_refuses(tmp_path: Path) -> None:
    graph: Graph = tiny_graph()
    graph.vocab_size = 77
    with raises(InvalidFileError, param="metadata.output"):
        write_bundle(tmp_path / "x.psm", graph)
    assert list(tmp_path.iterdir()) == []


def test_crc_is_zlibs() -> None:
    data = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)
    for size in (*range(300), 1000, 4095, 4096, 5000):
        for start in (0, 1, 7):
            piece = data[start:size].tobytes()
            assert crc32(piece) == zlib.crc32(piece), (start, size)
    assert crc32(data[500:].tobytes(), crc32(data[:500].tobytes())) == zlib.crc32(data.tobytes())
