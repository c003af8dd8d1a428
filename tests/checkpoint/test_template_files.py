"""Further chat templates stay with a model: in its bundle, in a folder made of that, and in GGUF's keys."""

from __future__ import annotations

from pathlib import Path

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.generation import read_chat_templates
from penstock.checkpoint.gguf.tokenizer_out import tokenizer_metadata
from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.checkpoint.side_files import read_folder_files, read_side_files
from penstock.graph.export import export_bundle
from penstock.graph.unpack_bundle import unpack_bundle
from tests.support.fake_model import byte_level_json
from tests.support.invariant_checkpoints import write_checkpoint

TEMPLATES = {"default": "{{ messages }}", "rag": "r", "tool_use": "t"}


def test_further_templates_stay_with_the_model(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATES["default"])
    (folder / "additional_chat_templates").mkdir()
    for name in ("rag", "tool_use"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(TEMPLATES[name])
    stamps = [stamp.name for stamp in Checkpoint.open(folder).files]
    assert {"additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja"} < set(stamps)
    export_bundle(folder, tmp_path / "out.psm", scheme="f32")
    assert read_chat_templates(read_side_files(tmp_path / "out.psm")) == TEMPLATES
    unpack_bundle(tmp_path / "out.psm", tmp_path / "unpacked")
    quantize_checkpoint(folder, tmp_path / "quantized", "w8a8")
    for copy in ("unpacked", "quantized"):
        assert read_chat_templates(read_folder_files(tmp_path / copy)) == TEMPLATES
        assert (tmp_path / copy / "additional_chat_templates" / "rag.jinja").read_text() == "r"
    keys = tokenizer_metadata(read_folder_files(folder) | {"tokenizer.json": byte_level_json()}, 300)
    assert {name: text for name, text in keys.items() if "template" in name} == {
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.chat_template.rag": "r",
        "tokenizer.chat_template.tool_use": "t",
    }
