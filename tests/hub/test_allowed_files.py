"""Which files of a repository are downloaded."""

from __future__ import annotations

import pytest

from penstock.hub.allowed_files import choose_files
from penstock.hub.names import ModelName
from penstock.hub.remote import RemoteFile, RemoteModel

MODULES = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
OTHERS = ["2_Dense/pytorch_model.bin", "onnx/model.safetensors", "2_Dense/x/config.json", "../1_Pooling/config.json"]


@pytest.mark.parametrize("has_modules", [True, False])
def test_modules_of_sentence_transformers(has_modules: bool) -> None:
    names = ["config.json", "model.safetensors", *MODULES, *OTHERS, *(["modules.json"] if has_modules else [])]
    model = RemoteModel(ModelName("a/b"), "0" * 40, tuple(RemoteFile(name, 10, "0" * 40) for name in names))
    chosen = {file.name for file in choose_files(model)}
    expected = {"config.json", "model.safetensors"}
    assert chosen == (expected | {*MODULES, "modules.json"} if has_modules else expected)
