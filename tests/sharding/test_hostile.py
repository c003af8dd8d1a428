"""Strategies and manifests with damaged values: one line of error, or a sound object; and bounds on memory."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config import ConfigReader
from penstock.core.rank_layout import RankLayout
from penstock.env import child_environment
from penstock.errors import PenstockError
from penstock.quant.tensor_writer import TensorEntry, TensorWriter
from penstock.sharding.folder import MANIFEST, STRATEGY, ShardedFolder
from penstock.sharding.strategy import ParameterCut, Strategy, config_checksum
from penstock.sharding.write import merge_folder, shard_folder
from tests.support.sharded_folders import DEMO, strategy_of

VALUES = [None, True, 0, -1, 2**70, 1.5, "", "x", "../x", "\0", [], [[]], [[0, 0]], {}, {"a": 1}, [None], [[[0, 1]]]]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(place for key in keys for place in places(value[key], (*path, key)))]


def mutations(value: Any, count: int) -> list[Any]:
    """Copies of a JSON value with one value replaced, one key removed or one renamed."""
    rng, found = random.Random(7), []
    everywhere = places(value)[1:]
    for _ in range(count):
        path, changed = rng.choice(everywhere), copy.deepcopy(value)
        parent = changed
        for key in path[:-1]:
            parent = parent[key]
        kind = rng.randrange(4)
        if kind == 0 and isinstance(parent, dict):
            del parent[path[-1]]
        elif kind == 1 and isinstance(parent, dict):
            parent[rng.choice(["x", "../x", ""])] = parent.pop(path[-1])
        else:
            parent[path[-1]] = rng.choice(VALUES)
        found.append(changed)
    return found


def refusal(call: Callable[[], object]) -> str:
    """The message with which a call is refused, "" if it is not."""
    try:
        call()
    except PenstockError as error:
        return str(error)
    return ""


def write_manifest(folder: Path, values: Any) -> None:
    body = json.dumps(values, indent=0).encode()
    digest = hashlib.sha256(body).hexdigest().encode()
    (folder / MANIFEST).write_bytes(b'{"sha256": "%s",\n"manifest": %s}\n' % (digest, body))


def test_damaged_strategies_are_one_line() -> None:
    messages = []
    for changed in mutations(json.loads(strategy_of(DEMO, 2).to_json()), 400):
        data = json.dumps(changed).encode()
        messages.append(refusal(lambda data=data: Strategy.parse(data)))
        if not messages[-1]:
            read = Strategy.parse(data)
            assert Strategy.parse(read.to_json()) == read
    assert all("\n" not in message and len(message) < 600 for message in messages)
    assert 300 < sum(map(bool, messages)) < 400


@pytest.mark.long
def test_damaged_manifests_with_a_right_checksum_are_one_line(tmp_path: Path) -> None:
    shard_folder(DEMO, tmp_path / "cut", strategy_of(DEMO, 2))
    values, messages = json.loads((tmp_path / "cut" / MANIFEST).read_bytes())["manifest"], []
    for number, changed in enumerate(mutations(values, 400)):
        write_manifest(tmp_path / "cut", changed)
        merged = tmp_path / f"merged-{number}"
        messages.append(refusal(lambda merged=merged: merge_folder(tmp_path / "cut", merged)))
        assert merged.exists() == (not messages[-1])
    assert all("\n" not in message and len(message) < 600 for message in messages)
    assert 300 < sum(map(bool, messages)) < 400


def test_damaged_headers_in_a_manifest_are_refused(tmp_path: Path) -> None:
    shard_folder(DEMO, tmp_path / "cut", strategy_of(DEMO, 2))
    values = json.loads((tmp_path / "cut" / MANIFEST).read_bytes())["manifest"]
    (name, header), *_ = values["headers"].items()
    for changed in mutations(json.loads(header), 200):
        values["headers"][name] = json.dumps(changed)
        write_manifest(tmp_path / "cut", values)
        message = refusal(lambda: merge_folder(tmp_path / "cut", tmp_path / "merged"))
        assert "\n" not in message
        if not message:  # metadata that no reader looks at
            shutil.rmtree(tmp_path / "merged")


PEAK = """
import sys
from collections.abc import Callable
from pathlib import Path
from penstock.checkpoint.convert import Conversion
from penstock.runtime.convert import convert
from penstock.runtime.machine import peak_rss_bytes
from penstock.sharding.strategy import Strategy
from penstock.sharding.write import merge_folder, shard_folder
source, out = map(Path, sys.argv[1:])
shard_folder(source, out / "cut", Strategy.read(out / "rows.json"))
shard_folder(out / "cut", out / "again", Strategy.read(out / "columns.json"))
merge_folder(out / "again", out / "merged")
convert(out / "merged", out / "f32", Conversion(dtype="f32"))
print(peak_rss_bytes() >> 20)
"""


@pytest.mark.long
def test_memory_does_not_depend_on_the_model(tmp_path: Path) -> None:
    """400 MB of weights, 280 of them in one tensor, in less than 200 MB."""
    source = tmp_path / "source"
    source.mkdir()
    shapes = {"model.embed_tokens.weight": (70000, 2000), "lm_head.weight": (30000, 2000)}
    entries = [TensorEntry(name, "BF16", shape) for name, shape in shapes.items()]
    writer, rows = TensorWriter(source / "model.safetensors", entries), np.arange(1000 * 2000, dtype=np.uint16)
    for name, (num_rows, _) in shapes.items():
        for start in range(0, num_rows, 1000):
            writer.add(name, rows + np.uint16(start // 1000))
    writer.close()
    (source / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 4}')
    checksum = config_checksum(ConfigReader({"model_type": "llama", "num_attention_heads": 4}))
    for cut, size in (("rows", 30000), ("columns", 2000)):
        ranges = (((0, size // 2),), ((size // 2, size),))
        own = {name: ParameterCut("bf16", shape, cut, ranges=ranges) for name, shape in shapes.items()}
        if cut == "rows":
            table = "model.embed_tokens.weight"
            own[table] = ParameterCut("bf16", shapes[table], cut, ranges=(((0, 69999),), ((69999, 70000),)))
        Strategy("llama", checksum, RankLayout(2), own).write(tmp_path / f"{cut}.json")
    command = [sys.executable, "-c", PEAK, str(source), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200
    assert (tmp_path / "merged" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", [STRATEGY, MANIFEST, "config.json"])
def test_files_that_are_no_files_are_refused(name: str, tmp_path: Path) -> None:
    shard_folder(DEMO, tmp_path / "cut", strategy_of(DEMO, 2))
    (tmp_path / "cut" / name).unlink()
    (tmp_path / "cut" / name).mkdir()
    with pytest.raises(PenstockError):
        ShardedFolder.open(tmp_path / "cut")
