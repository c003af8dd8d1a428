"""Folders of every form that opens here are also pulled from a hub, whole, and found again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.side_files import model_folder
from penstock.errors import InvalidFileError, UnsupportedError
from penstock.hub.download import download
from penstock.hub.download_estimate import estimate_download
from penstock.hub.downloaded import find_downloaded, list_downloaded
from penstock.hub.names import ModelName
from tests.support.encoders import sentence_transformer
from tests.support.errors import raises
from tests.support.hub_server import HubServer
from tests.support.invariant_checkpoints import write_checkpoint

NAME = ModelName("o/n")
MODEL = ("config.json", "model.safetensors", "tokenizer.json", "sentence_bert_config.json")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cut(folder: Path, *, index: bool) -> Path:
    """Cut the weights of a folder into two shards."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, own in enumerate((names[::2], names[1::2]), 1):
        shard = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in own}, folder / shard)
        weight_map |= dict.fromkeys(own, shard)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def decoder(folder: Path) -> Path:
    return cut(write_checkpoint(folder, tie_word_embeddings=True), index=False)


def encoder(folder: Path) -> Path:
    """A folder of sentence-transformers whose first module has a folder of its own."""
    folder.mkdir()
    sentence_transformer(folder, "pooling_mode_mean_tokens", has_dense=True)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 5}))
    (folder / "0_Transformer").mkdir()
    for name in MODEL:
        (folder / name).rename(folder / "0_Transformer" / name)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def sharded_encoder(folder: Path, *, index: bool) -> Path:
    cut(encoder(folder) / "0_Transformer", index=index)
    return folder


FORMS = {
    "shards without an index": decoder,
    "a folder of the first module": encoder,
    "shards in it": lambda folder: sharded_encoder(folder, index=False),
    "shards in it with an index": lambda folder: sharded_encoder(folder, index=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_opens_from_a_folder_opens_from_a_hub(form: str, hub: HubServer, hub_cache: Path, tmp_path: Path) -> None:
    folder = FORMS[form](tmp_path / "folder")
    files = files_of(folder)
    others = ("0_Transformer/x.py", "0_Transformer/onnx/model.safetensors", "9_Other/x.json", "x/config.json", "a.md")
    hub.add(str(NAME), files | dict.fromkeys(others, b"{}"))
    plan = estimate_download(NAME)
    weights = sum(len(data) for name, data in files.items() if name.endswith(".safetensors") and "Dense" not in name)
    assert plan.shape is None or plan.shape.num_parameters <= weights
    path = download(plan)
    assert files_of(path) == files
    assert find_downloaded(NAME) == path
    (entry,) = list_downloaded()
    assert entry.config() is not None
    assert entry.shape() == plan.shape
    pulled, expected = Checkpoint.open(path), Checkpoint.open(folder)
    assert pulled.tensors.keys() == expected.tensors.keys()
    assert all(np.array_equal(pulled.read(name), expected.read(name)) for name in expected.tensors)
    assert pulled.side_files() == expected.side_files()
    next(model_folder(path).glob("model*.safetensors")).unlink()
    assert list_downloaded()[0].state == ("no safetensors" if form == "a folder of the first module" else "incomplete")
    assert find_downloaded(NAME) is None


def test_a_repository_that_lacks_a_shard_is_refused(hub: HubServer, hub_cache: Path, tmp_path: Path) -> None:
    files = files_of(decoder(tmp_path / "folder"))
    del files["model-00001-of-00002.safetensors"]
    hub.add(str(NAME), files)
    with raises(InvalidFileError, match=r"model-00001-of-00002\.safetensors"):
        estimate_download(NAME)
    (tmp_path / "folder" / "model-00001-of-00002.safetensors").unlink()
    with raises(InvalidFileError, match=r"model-00001-of-00002\.safetensors"):
        Checkpoint.open(tmp_path / "folder")
    hub.add(str(NAME), files | {"model-00001-of-00003.safetensors": b""})  # of which model?
    with pytest.raises(UnsupportedError):
        estimate_download(NAME)


@pytest.mark.parametrize(
    "modules", [b"[]", b"[{}]", b"{", b'[{"path": "../x"}]', b'[{"path": "1_Pooling"}]', b"[" * 99]
)
def test_modules_that_name_no_model_are_refused(modules: bytes, hub: HubServer, hub_cache: Path) -> None:
    hub.add(str(NAME), {"modules.json": modules, "0_Transformer/config.json": b"{}", "model.safetensors": b""})
    with raises((InvalidFileError, UnsupportedError)):
        estimate_download(NAME)
    assert not hub_cache.exists()
