"""An ONNX file whose external data is larger than 2 GiB is read without a copy of it in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

ROWS, COLS = 700_000, 1024
MAX_PEAK = 1 << 30
READ = """
import sys
import numpy as np
from penstock.graph.onnx.reader import read_onnx
from penstock.runtime.machine import peak_rss_bytes
draft = read_onnx(sys.argv[1])
(call,) = draft.calls
table = call.argument(0).value
assert isinstance(table.base if table.base is not None else table, np.memmap), type(table)
assert table.shape == (700_000, 1024) and table[-1].tolist() == list(range(1024)) and not table[0].any()
print(peak_rss_bytes())
"""


@pytest.mark.long
def test_external_data_above_2_gib_stays_in_its_file(tmp_path: Path) -> None:
    size = ROWS * COLS * 4
    assert size > 2 << 30
    with (tmp_path / "table.bin").open("wb") as file:  # sparse: only the last row takes space
        file.seek(size - 4 * COLS)
        file.write(np.arange(COLS, dtype=np.float32).tobytes())
    table = TensorProto(name="table", data_type=TensorProto.FLOAT, dims=[ROWS, COLS])
    table.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "table.bin"), ("offset", "0"), ("length", str(size))):
        table.external_data.append(onnx.StringStringEntryProto(key=key, value=value))
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["N"])
    rows = helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["N", COLS])
    graph = helper.make_graph([helper.make_node("Gather", ["table", "ids"], ["rows"])], "net", [ids], [rows], [table])
    path = tmp_path / "net.onnx"
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString()
    )
    command = [sys.executable, "-c", READ, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < MAX_PEAK
