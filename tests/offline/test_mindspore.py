"""Files of the documents of MindSpore: what opens, what a key has become, and the way over for what does not."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from penstock import AutoModel, lite, pipeline
from penstock.checkpoint.folder import Checkpoint
from penstock.cli.main import main
from penstock.core.native import Model
from penstock.errors import InvalidFileError, PenstockError, UnsupportedError
from penstock.lite.settings import read_values
from penstock.offline.export_config import read_export_config
from penstock.offline.sources import find_file
from penstock.sharding.write import shard_folder
from tests.support.errors import raises
from tests.support.lite_demo import BUNDLE, FOLDER
from tests.support.sharded_folders import strategy_of

ATLAS = """
[ascend_context]
plugin_custom_ops=All
provider=ge
rank_table_file=/path/rank_table.json

[ge_session_options]
ge.externalWeight=1
ge.exec.formatMode=1
ge.exec.atomicCleanPolicy=1
ge.event=notify
ge.exec.staticMemoryPolicy=2
ge.exec.precision_mode=must_keep_origin_dtype

[ge_graph_options]
ge.dynamicDims=1,1;2,1
unheard_of=1

[model]
batch_size = 2
"""
INFER = """
run_mode: "export"
use_parallel: True
parallel_config: {data_parallel: 1, model_parallel: 2, pipeline_stage: 1, context_parallel: 1, expert_parallel: 1}
load_checkpoint: "cut"
src_strategy_path_or_dir: "cut"
model: {model_config: {use_past: True}}
infer:
    prefill_model_path: "bloom_560m_prefill.mindir"
    increment_model_path: "bloom_560m_inc.mindir"
    infer_seq_length: 512
    model_type: mindir
"""


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    for world in (2, 3):
        shard_folder(FOLDER, folder / ("cut" if world == 2 else "three"), strategy_of(FOLDER, world))
    return folder


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_each_key_of_an_ini_file_is_answered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = written(tmp_path / "config.ini", ATLAS)
    with caplog.at_level(logging.WARNING):
        assert read_values(file) == {"batch_size": 2}
    lines = [record.getMessage() for record in caplog.records]
    keys = [line.split("=")[0] for line in ATLAS.splitlines() if "=" in line and " " not in line]
    assert len(lines) == len(keys) == 11
    for key, line in zip(keys, lines, strict=True):
        assert f"] {key}: " in line
        assert line.endswith("not used") == (key == "unheard_of")
    written(file, ATLAS.replace("must_keep_origin_dtype", "force_fp32"))
    with raises(UnsupportedError, param="ge.exec.precision_mode"):
        read_values(file)
    assert read_values(written(file, "[model]\nBatch_Size = 3\n")) == {"batch_size": 3}
    for text, name in (("[modle]\nbatch_size = 2\n", "modle"), ("# GE\n\nprovider=ge\n", "line 3")):
        with raises(InvalidFileError, match=name):
            read_values(written(file, text))


def test_a_pipeline_takes_the_ini_file(tmp_path: Path) -> None:
    file = written(tmp_path / "config.ini", ATLAS)
    with pipeline(model=BUNDLE, backend="mslite", ge_config_path=file, device_id=0) as generate:
        assert generate("def add(a, b):", max_tokens=2, temperature=0).token_ids


@pytest.mark.parametrize("name", ["a.mindir", "a.ms", "a.ckpt", "a.om"])
def test_files_of_mindspore_are_answered(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / name, "a graph")
    for call, param in (
        (lambda: Model.open(path), "model"),
        (lambda: Checkpoint.open(path), "model"),
        (lambda: pipeline(model=path), "model"),
        (lambda: lite.Model().build_from_file(path, lite.ModelType.PENSTOCK), "model_path"),
    ):
        with raises(UnsupportedError, param=param):
            call()
    shutil.copy(FOLDER / "config.json", tmp_path)
    with raises(UnsupportedError, param="model"):
        Checkpoint.open(tmp_path)


def test_a_model_folder_of_mindspore_is_answered(tmp_path: Path) -> None:
    written(tmp_path / "test.yaml", "infer:\n  infer_seq_length: 64\n")
    written(tmp_path / "a_prefill_graph.mindir", "a graph")
    with raises(UnsupportedError, param="model"):
        pipeline(model=tmp_path)


@pytest.mark.parametrize("name", ["MINDIR", "MINDIR_LITE"])
def test_model_types_of_mindspore_are_answered(name: str) -> None:
    with raises(UnsupportedError, param="model_type"):
        lite.Model().build_from_file(BUNDLE, lite.ModelType[name])


def test_devices_of_mindspore_are_answered() -> None:
    context = lite.Context()
    for device in (context.ascend, context.gpu):
        for field, value in (("device_id", 1), ("rank_id", 1), ("provider", "ge")):
            with raises(UnsupportedError):
                setattr(device, field, value)
        device.device_id = 0
    for target in ("Ascend", "gpu"):
        with raises(PenstockError, param="target"):
            context.target = [target]


def test_the_yaml_of_an_export_names_bundles(cut: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same file is then the pipeline's, which opens what the export wrote."""
    file = written(cut / "run_bloom_560m.yaml", INFER)
    with caplog.at_level(logging.WARNING):
        config = read_export_config(file)
    assert (config.checkpoint, config.config) == (cut / "cut", None)
    assert config.prefill == cut / "bloom_560m_prefill.psm"
    assert config.increment == cut / "bloom_560m_inc.psm"
    assert len(caplog.records) == 1
    assert find_file(file).prefill_model_path == str(config.prefill)
    assert main(["infer", "--model", str(file), "x"]) == 1  # before the export


def test_a_strategy_is_compared_with_the_folder(cut: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = INFER[: INFER.index("infer:")]
    assert find_file(written(cut / "a.yaml", text)).ranks == {"tensor_parallel_size": 2}
    whole = text.replace('"cut"', f'"{FOLDER}"', 1)
    with caplog.at_level(logging.WARNING):
        find_file(written(cut / "a.yaml", whole))
    assert ["src_strategy_path_or_dir" in record.getMessage() for record in caplog.records] == [True]
    written(cut / "src_strategy.ckpt", "")
    for changed, kind, param in (
        (("_dir: \"cut\"", "_dir: three/strategy.json"), InvalidFileError, "src_strategy_path_or_dir"),
        (("_dir: \"cut\"", "_dir: src_strategy.ckpt"), UnsupportedError, "src_strategy_path_or_dir"),
        (("_dir: \"cut\"", "_dir: none"), PenstockError, "src_strategy_path_or_dir"),
        (("_dir: \"cut\"", "_dir: 3"), InvalidFileError, "src_strategy_path_or_dir"),
        (("model_parallel: 2", "model_parallel: 3"), InvalidFileError, "parallel_config.model_parallel"),
    ):  # fmt: skip
        with raises(kind, param=param):
            find_file(written(cut / "a.yaml", text.replace(*changed)))


@pytest.mark.long
def test_a_sharded_folder_runs_in_ranks_and_whole(cut: Path) -> None:
    text = INFER[: INFER.index("infer:")]
    ids = []
    for changed in (text, text.replace("use_parallel: True", "use_parallel: False")):
        with AutoModel.from_config(written(cut / "b.yaml", changed)) as model:
            ids.append(model.generate([5, 6, 7], max_new_tokens=4, do_sample=False))
    assert ids[0] == ids[1]
