"""The example of a user's own network: eager, captured, as a bundle, and registered."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from penstock import LLM
from penstock.cli.main import make_parser
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.graph.export import export_bundle
from penstock.models import registry
from penstock.models.families import built_in_families
from penstock.models.registry import (
    find_network,
    load_network_script,
    register_network,
    registered_script,
    supported_types,
)
from penstock.runtime.eager import EagerProgram
from penstock.runtime.native import NativeProgram
from penstock.runtime.program import ProgramLimits
from tests.models.steps import relative_error, run_whole
from tests.support.errors import raises
from tests.support.my_network import CONFIG, SCRIPT, SPEC, folder, plain_logits, tensors

__all__ = ["folder", "tensors"]

LIMITS = ProgramLimits(96, 2, max_rows=96, num_pages=6, context_len=96)


def test_runs_eagerly_and_as_a_graph(folder: Path, tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    token_ids = np.random.default_rng(0).integers(0, 103, 70).tolist()
    export_bundle(folder, tmp_path / "mine.psm", network=SPEC)
    eager = EagerProgram(folder, limits=LIMITS, network=SPEC)
    native, _ = NativeProgram.open(tmp_path / "mine.psm", limits=LIMITS)
    found = run_whole(eager, token_ids)
    assert relative_error(found, plain_logits(tensors, token_ids)) < 1e-4
    assert found.tobytes() == run_whole(native, token_ids, 7).tobytes()
    eager.close()
    native.close()


@pytest.mark.long
def test_an_llm_takes_the_class_itself(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    network = load_network_script(SPEC).Network
    for mode in ("eager", "graph"):
        with LLM(folder, network=network, mode=mode, context_len=96, use_cache=False) as llm:
            assert relative_error(llm.logits([1, 2, 3]), plain_logits(tensors, [1, 2, 3])) < 1e-4


def test_register_network_makes_the_type_known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    with raises(UnsupportedError, param="model_type", match="expected one of .*llama, .* got 'mine'"):
        EagerProgram(folder, limits=LIMITS)
    register_network("mine", load_network_script(SPEC).Network)
    assert supported_types() == sorted([*built_in_families(), "mine"])
    assert find_network("mine").Network.__name__ == "Net"
    assert registered_script("mine") == SPEC
    assert registered_script("llama") is None
    program = EagerProgram(folder, limits=LIMITS)
    assert program.info.network == "mine"
    program.close()


def test_graph_mode_refuses_a_class_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})

    class Local(torch.nn.Module):
        Config = load_network_script(SPEC).Config

    register_network("mine", Local)
    with raises(UnsupportedError, param="model_type"):
        registered_script("mine")


def test_a_config_may_rename_its_context_length(
    tensors: dict[str, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SCRIPT.read_text().replace('"max_position_embeddings"', '"block_size"')
    (tmp_path / "net.py").write_text(text)
    config = {"block_size" if key == "max_position_embeddings" else key: value for key, value in CONFIG.items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with LLM(tmp_path, mode="eager", network=f"{tmp_path}/net.py:Net") as llm:
        assert llm.info.context_len == 96
        assert llm.logits([1, 2]).shape == (2, 103)
    args = make_parser(["inspect"]).parse_args(["inspect", str(tmp_path)])
    assert args.run(args) == 0
    assert "a checkpoint folder" in capsys.readouterr().out


def test_bad_scripts_and_classes_are_refused(tmp_path: Path) -> None:
    with raises(InvalidArgumentError, param="network", match=r"path/to/file\.py:ClassName"):
        load_network_script("my_network")
    with raises(FileAccessError, param="network"):
        load_network_script(f"{tmp_path}/none.py:Net")
    with raises(InvalidArgumentError, param="network", match=r"torch\.nn\.Module"):
        load_network_script(f"{SCRIPT}:Other")
    with raises(InvalidArgumentError, param="network_class"):
        register_network("mine", dict)
    with raises(InvalidArgumentError, param="config_class"):
        register_network("mine", torch.nn.Linear)
    (tmp_path / "bare.py").write_text("import torch\n\nclass Net(torch.nn.Module):\n    pass\n")
    with raises(InvalidArgumentError, param="network", match="class Config"):
        load_network_script(f"{tmp_path}/bare.py:Net")


@pytest.mark.parametrize("scheme", ["f32", "w4a8"])
def test_missing_and_left_over_tensors_are_named(scheme: str, tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors | {"other.weight": tensors["head.weight"]}, tmp_path / "model.safetensors")
    with raises(InvalidFileError, param="other.weight", match=r": has .*'other\.weight'"):
        EagerProgram(tmp_path, scheme=scheme, limits=LIMITS, network=SPEC)
    save_file({n: v for n, v in tensors.items() if n != "head.weight"}, tmp_path / "model.safetensors")
    with raises(InvalidFileError, param="head.weight", match=r": lacks .*'head\.weight'"):
        EagerProgram(tmp_path, scheme=scheme, limits=LIMITS, network=SPEC)
    save_file(tensors | {"head.weight": np.zeros((103, 47), np.float32)}, tmp_path / "model.safetensors")
    with raises(InvalidFileError, param="head.weight", match=r"'head\.weight': shape: .*\[103, 48\], got \[103, 47\]"):
        EagerProgram(tmp_path, scheme=scheme, limits=LIMITS, network=SPEC)


def test_registered_network_runs_in_graph_mode_like_eager(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The capturing child knows nothing of this process: it is told the file."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    register_network("mine", load_network_script(SPEC).Network)
    results = []
    for mode in ("graph", "eager"):
        with LLM(folder, mode=mode) as llm:
            assert isinstance(llm.logits([1, 2, 3, 4]), np.ndarray)
            results.append(llm.logits([1, 2, 3, 4]).tobytes())
    assert results[0] == results[1]
