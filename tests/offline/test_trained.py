"""A network of our layers that a program of one's own trains and exports; weights whose config lies elsewhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from examples.my_network import Config, Net
from penstock import nn
from penstock.config import ConfigReader
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.offline.joined_folder import joined_folder
from tests.support.errors import raises
from tests.support.lite_demo import BUNDLE, FOLDER, ROOT

CONFIG = {
    "model_type": "my_network", "vocab_size": 64, "width": 32, "max_position_embeddings": 32, "num_layers": 2,
    "num_heads": 2,
}  # fmt: skip
STEP = 3
EXAMPLE = ROOT / "examples" / "my_network.py"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The networks are too small for several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(steps: int) -> tuple[Net, list[float]]:
    """A network that counts in threes, and its losses."""
    torch.manual_seed(0)
    network = Net(Config.read(ConfigReader(CONFIG, "config.json")))
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    nn.make_trainable(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        ids = (STEP * torch.arange(12) + torch.randint(64, (4, 1))) % 64
        logits = network(nn.training_batch(ids[:, :-1]))
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return network, losses


@pytest.mark.long
def test_a_network_is_trained_and_exported(tmp_path: Path, here: list[dict[str, Any]]) -> None:
    """Both names are of one graph; the file computes what the trainer's network does."""
    network, losses = trained(24)
    assert all(parameter.grad is not None for parameter in network.parameters())
    assert losses[-1] < losses[0] / 2
    pair = (tmp_path / "a_prefill_graph.psm", tmp_path / "a_inc_graph.psm")
    assert penstock.export(network, pair, config=CONFIG) == pair[0]
    assert pair[1].samefile(pair[0])
    assert here[0]["network"] == f"{EXAMPLE}:Net"
    ids = [(5 + STEP * i) % 64 for i in range(10)]
    with torch.no_grad():
        expected = network(nn.training_batch(torch.tensor([ids])))
    with penstock.LLM(pair[0]) as llm:
        assert torch.allclose(torch.tensor(llm.logits(ids)), expected, rtol=1e-4, atol=1e-4)
        (result,) = llm.generate([ids], temperature=0, max_tokens=1)
    assert result.token_ids[0] == int(expected[-1].argmax())


def test_what_a_network_in_memory_needs_is_named(tmp_path: Path) -> None:
    network, _ = trained(0)
    with raises(InvalidArgumentError, param="config"):
        penstock.export(network, tmp_path / "a.psm")
    with raises(FileAccessError, param="config"):
        penstock.export(network, tmp_path / "a.psm", config=tmp_path)
    with raises(InvalidArgumentError, param="config"):
        penstock.export(network, tmp_path / "a.psm", config={"width": object()})
    with raises(InvalidArgumentError, param="out"):
        penstock.export(network, (tmp_path / "a.psm",) * 3, config=CONFIG)

    class Local(Net):
        pass

    with raises(InvalidArgumentError, param="network"):
        penstock.export(Local(Config.read(ConfigReader(CONFIG, "config.json"))), tmp_path / "a.psm", config=CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_gradients_are_refused_where_there_are_none() -> None:
    network, _ = trained(0)
    batch = nn.training_batch(torch.zeros(1, 4, dtype=torch.int64))
    with raises(InvalidArgumentError, param="positions"):
        network(batch._replace(positions=batch.positions + 1))
    conv = nn.ShortConv(32, 3)
    nn.make_trainable(conv)
    gate = torch.ones(4, 32, requires_grad=True)
    with raises(UnsupportedError, param="gradients"):
        conv(gate, gate, batch)


@pytest.mark.parametrize("way", ["folder", "file", "yaml"])
def test_weights_with_a_config_elsewhere(way: str, tmp_path: Path, here: list[dict[str, Any]]) -> None:
    weights, config = tmp_path / "weights", tmp_path / "config"
    weights.mkdir()
    shutil.copytree(FOLDER, config, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copy(FOLDER / "model.safetensors", weights / "model.safetensors")
    out = tmp_path / "a.psm"
    if way == "yaml":
        (config / "test.yaml").write_text("load_checkpoint: ../weights\nscheme: w8a8\n")
        out = penstock.export(config)
    else:
        source = weights if way == "folder" else weights / "model.safetensors"
        penstock.export(source, out, config=config / "config.json", scheme="w8a8")
    assert out.read_bytes() == BUNDLE.read_bytes()
    with raises(InvalidFileError, param="model"):
        penstock.export(config, tmp_path / "b.psm", config=config)


def test_the_command_takes_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.cli.main import main

    (tmp_path / "a.yaml").write_text(json.dumps({"load_checkpoint": str(FOLDER)}))
    for words in (["--config_path", str(tmp_path / "a.yaml")], [str(FOLDER), str(tmp_path / "out"), "--tp", "2"]):
        assert main(["export", *words, "--config", str(FOLDER)]) == 2
        assert "--config" in capsys.readouterr().err


@pytest.mark.parametrize("name", [".", ".."])
def test_weights_in_a_folder_without_a_name_are_joined(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "in"
    place.mkdir()
    (place / name / "model.safetensors").write_bytes(b"")
    monkeypatch.chdir(place)
    with joined_folder(Path(name), {"model_type": "mine"}) as folder:
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
        assert folder.parent.name.startswith("penstock-")
