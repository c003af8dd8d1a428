"""Which files of a repository are downloaded."""

from __future__ import annotations

import pytest

from penstock.errors import InvalidArgumentError, InvalidFileError
from penstock.hub.allowed_files import choose_files, choose_gguf
from penstock.hub.names import ModelName
from penstock.hub.remote_model import RemoteFile, RemoteModel
from tests.support.errors import raises

MODULES = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
OTHERS = ["2_Dense/pytorch_model.bin", "onnx/model.safetensors", "2_Dense/x/config.json", "../1_Pooling/config.json"]


def repository(names: list[str]) -> RemoteModel:
    return RemoteModel(ModelName("a/b"), "0" * 40, tuple(RemoteFile(name, 10, "0" * 40) for name in names))


def test_a_split_gguf_model_comes_whole() -> None:
    parts = [f"q8/m-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    model = repository([*reversed(parts), "m.gguf", "q8/m-00001-of-00002.gguf", "a/b/m.gguf", "../m.gguf"])
    for part in parts:
        assert [file.name for file in choose_gguf(model, part)] == parts
    assert [file.name for file in choose_gguf(model, "m.gguf")] == ["m.gguf"]
    with pytest.raises(InvalidFileError, match=r"expected 'q8/m-00002-of-00002\.gguf' beside 'q8/m-00001-of-00002"):
        choose_gguf(model, "q8/m-00001-of-00002.gguf")
    for name in ("a/b/m.gguf", "../m.gguf"):
        with raises(InvalidArgumentError, param="gguf", match=r"--gguf: expected one of m\.gguf, q8/"):
            choose_gguf(model, name)


def test_further_chat_templates_are_downloaded() -> None:
    names = [f"additional_chat_templates/{name}" for name in ("tool_use.jinja", "x.py", "a/b.jinja", ".jinja")]
    model = repository(["config.json", "model.safetensors", "chat_template.jinja", *names])
    chosen = {file.name for file in choose_files(model)}
    assert chosen == {"config.json", "model.safetensors", "chat_template.jinja", names[0]}


@pytest.mark.parametrize("has_modules", [True, False])
def test_modules_of_sentence_transformers(has_modules: bool) -> None:
    names = ["config.json", "model.safetensors", *MODULES, *OTHERS, *(["modules.json"] if has_modules else [])]
    model = repository(names)
    chosen = {file.name for file in choose_files(model)}
    expected = {"config.json", "model.safetensors"}
    assert chosen == (expected | {*MODULES, "modules.json"} if has_modules else expected)
