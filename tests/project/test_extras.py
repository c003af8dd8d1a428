"""Errors about a missing extra give a command that installs it here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from penstock import extras


class _Distribution:
    def __init__(self, url: str) -> None:
        self.url = url

    def read_text(self, name: str) -> str | None:
        return json.dumps({"url": self.url}) if name == "direct_url.json" and self.url else None


def test_the_command_installs_from_the_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "a clone"
    tree.mkdir()
    (tree / "pyproject.toml").touch()
    monkeypatch.setattr(extras.shutil, "which", lambda _name: str(Path(sys.executable).parent / "pip"))
    for url, source in (("", "penstock"), ("https://example.org/p.whl", "penstock"), (tree.as_uri(), str(tree))):
        monkeypatch.setattr("importlib.metadata.distribution", lambda _name, url=url: _Distribution(url))
        assert extras.install_command("onnx") == f"pip install '{source}[onnx]'"
    assert extras.install_command("torch").endswith("[torch]' --extra-index-url https://download.pytorch.org/whl/cpu")


def test_the_command_names_a_python_that_is_not_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.shutil, "which", lambda _name: "/usr/bin/pip")
    assert extras.install_command("onnx").startswith(f"{sys.executable} -m pip install '")
