"""penstock new servable: a folder that is whole, and never one that was there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from penstock.cli.main import main
from penstock.servables.api.declare import InputError, collect_declarations
from penstock.servables.lifecycle.folder_scan import scan_folder


def test_the_new_servable_runs_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "servable", "my-own_1", "--into", str(tmp_path / "models")]) == 0
    assert "penstock serve" in capsys.readouterr().out
    found, refused = scan_folder(tmp_path / "models")
    assert (list(found), list(found["my-own_1"].versions), refused) == (["my-own_1"], [1], {})
    assert [one.name for one in (tmp_path / "models").iterdir()] == ["my-own_1"], "nothing is left beside it"
    spec = importlib.util.spec_from_file_location("servable_of_test", found["my-own_1"].script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with collect_declarations() as declared:
        spec.loader.exec_module(module)
    assert (list(declared.methods), list(declared.stages)) == (["predict"], ["double"])
    batch = np.ones((2, 4), np.float32)
    assert np.array_equal(module.double(batch), batch * 2)
    with pytest.raises(InputError, match="0 or more"):
        module.double(-batch)


def test_an_existing_folder_is_not_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("mine", "dangling"):
        assert main(["new", "servable", name, "--into", str(tmp_path)]) == 1
        assert "exists already" in capsys.readouterr().err
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize("name", ["1a", "a.b", "a b", "../a", "", "a" * 129])
def test_invalid_names_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["new", "servable", name, "--into", str(tmp_path)]) == 2
    assert "NAME: expected a letter" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
