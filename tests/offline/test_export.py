"""Bundles as configuration files, folders, networks in memory and scripts say: byte for byte those of the command."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.errors import InvalidArgumentError, InvalidFileError, PenstockError, UnsupportedError
from penstock.graph.export import export_bundle
from penstock.graph.replace_tail import replace_tail
from tests.support.command import Run
from tests.support.errors import raises
from tests.support.lite_demo import BUNDLE, CHANGED, FOLDER, folder, values


@pytest.mark.long
def test_a_model_folder_becomes_one_that_a_pipeline_takes(penstock_command: Run, tmp_path: Path) -> None:
    """The real command, in the document's order: export, then the folder by its path."""
    model = tmp_path / "my-model"
    shutil.copytree(FOLDER, model)
    (model / "test.yaml").write_text(
        "scheme: w8a8\nmodel:\n  model_config:\n    use_past: True\ninfer:\n  infer_seq_length: 512\n"
    )
    done = penstock_command("export", "--model-dir", model)
    assert (done.returncode, done.stderr.count("error")) == (0, 0)
    prefill, increment = model / "test_prefill_graph.psm", model / "test_inc_graph.psm"
    assert f"{prefill} (also {increment}, the same file): llama, w8a8, " in done.stdout
    assert prefill.samefile(increment)
    assert prefill.read_bytes() == BUNDLE.read_bytes()
    with penstock.pipeline("text_generation", model) as one, penstock.pipeline(model=BUNDLE) as other:
        assert one.config.infer_seq_length == 512
        assert one("a", seed=1, max_tokens=8).token_ids == other("a", seed=1, max_tokens=8).token_ids


def test_a_configuration_file(here: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    file = tmp_path / "run_demo.yaml"
    file.write_text(
        f"run_mode: \"export\"\nload_checkpoint: \"{FOLDER}\"\nsrc_strategy_path_or_dir: \"\"\n"
        "model:\n  model_config:\n    use_past: True\n    is_sample_acceleration: True\n"
        "infer:\n    prefill_model_path: out/a.psm\n    increment_model_path: out/b.psm\n    infer_seq_length: 512\n"
        "    model_type: penstock\n"
    )  # fmt: skip
    assert penstock.export(file, scheme="w8a8") == tmp_path / "out" / "a.psm"
    assert here[0]["tail"] == "argmax"
    replace_tail(BUNDLE, tmp_path / "tail.psm", "argmax")
    assert (tmp_path / "out" / "b.psm").read_bytes() == (tmp_path / "tail.psm").read_bytes()
    with penstock.pipeline("text_generation", file) as generate:
        assert len(generate("a", max_tokens=4).token_ids) == 4
        with raises(UnsupportedError, param="is_sample_acceleration", match="argmax"):
            generate("a", is_sample_acceleration=False)
    with raises(InvalidArgumentError, param="tail", match="argmax"):
        penstock.export(file, tail="topk:3")
    with raises(InvalidArgumentError, param="out"):
        penstock.export(file, tmp_path / "c.psm")


@pytest.mark.long
def test_a_network_in_memory(here: list[dict[str, Any]], tmp_path: Path) -> None:
    """As it was loaded it makes the demo bundle again; changed it makes the bundle of its new weights."""
    network = penstock.load_network(FOLDER)
    out = tmp_path / "a.psm"
    assert penstock.export(network, out, scheme="w8a8") == out
    assert out.read_bytes() == BUNDLE.read_bytes()
    new = values(1.25)
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        for name in CHANGED:
            parameters[name].copy_(torch.from_numpy(new[name]))
    penstock.export(network, out, scheme="w8a8")
    rounded = {name: array.copy() for name, array in new.items()}
    for name in CHANGED:
        rounded[name] = parameters[name].detach().float().numpy()
    export_bundle(folder(tmp_path / "new", rounded), tmp_path / "b.psm", scheme="w8a8")
    with penstock.pipeline(model=out) as one, penstock.pipeline(model=tmp_path / "b.psm") as other:
        assert one("a", seed=1, max_tokens=8).token_ids == other("a", seed=1, max_tokens=8).token_ids
    with raises(InvalidArgumentError, param="model", match="got int"):
        penstock.export(3, out)
    with raises(InvalidArgumentError, param="config"):
        penstock.export(torch.nn.Linear(2, 2), out)


def test_a_script_of_ones_own(here: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from penstock.models.decoders.llama import Config, Network\n\n\nclass Net(Network):\n    Config = Config\n"
    )
    model = tmp_path / "model"
    shutil.copytree(FOLDER, model)
    (model / "a.yaml").write_text("scheme: w8a8\n")
    script = f"{tmp_path / 'net.py'}:Net"
    assert penstock.export(model, network=script) == model / "a_prefill_graph.psm"
    assert here[0]["network"] == script
    with penstock.pipeline(model=model) as one, penstock.pipeline(model=BUNDLE) as other:
        assert one("a", seed=1, max_tokens=8).token_ids == other("a", seed=1, max_tokens=8).token_ids


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run_mode: finetune\n", "run_mode .*export, not 'finetune'"),
        ("src_strategy_path_or_dir: /a\n", "src_strategy_path_or_dir: "),
        ("only_save_strategy: True\n", "only_save_strategy: .*penstock plan"),
        ("model:\n  model_config:\n    use_past: 1\n", "use_past: expected true or false, got 1"),
        ("model:\n  model_config:\n    use_psat: True\n", "model_config: .*'use_psat'; did you mean use_past"),
        ("models: {}\n", "'models'; did you mean model"),
        ("load_checkpoint: [a]\n", "load_checkpoint: .*string"),
        ("infer:\n  prefill_model_path: a.onnx\n", r"prefill_model_path .*\.psm, not 'a\.onnx'"),
        ("infer:\n  model_type: onnx\n", "model_type .*'penstock'"),
        ("infer:\n  increment_model_path: a.psm\n", "increment_model_path .*prefill_model_path"),
        ("infer: []\n", r"infer: .*mapping, got \[\]"),
        ("run_mode: [export\n", 'in "[a-z]+.yaml", line 1'),
        ("load_checkpoint: none\n", "none"),
        ("network: net.py:Net\n", ": network: "),
    ],
)
def test_files_that_are_refused(text: str, words: str, here: list[dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises((InvalidFileError, PenstockError), match=words):
        penstock.export(file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.yaml"]


def test_ways_of_the_command(penstock_command: Run, tmp_path: Path) -> None:
    for arguments in (
        [],
        [FOLDER],
        [FOLDER, "a.psm", "--model-dir", FOLDER],
        ["--config-path", "a", "--model-dir", "b"],
    ):
        done = penstock_command("export", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert "export: expected MODEL and OUT.psm, or --config-path FILE.yaml, or --model-dir DIR" in done.stderr
    done = penstock_command("export", "--model-dir", FOLDER)
    assert "expected exactly one YAML file, got none" in done.stderr
