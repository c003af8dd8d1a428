"""``penstock serve --network``: checkpoint folders of a user's own networks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.cli.main import make_parser
from penstock.cli.service.serve import settings_of
from penstock.errors import FileAccessError, InvalidArgumentError
from tests.support.errors import raises
from tests.support.my_network import CONFIG, SCRIPT, SPEC, tensors
from tests.support.serve_command import ask, serving

__all__ = ["tensors"]


def write_folder(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.long
def test_serves_a_folder_with_a_network_script(
    tensors: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    folder = write_folder(tmp_path / "mine", tensors)
    (tmp_path / "net.py").write_bytes(SCRIPT.read_bytes())
    options = ("--network", "mine=net.py:Net", "--context-len", "64", "--max-requests", "2")
    with serving(folder, *options, cwd=tmp_path) as (_, url, _):
        answer = ask(url, "/v1/completions", {"model": "mine", "prompt": [1, 2, 3], "max_tokens": 4})
        assert answer["usage"]["completion_tokens"] == 4


def test_a_name_gives_one_folder_its_script(tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    first, second = (str(write_folder(tmp_path / name, tensors)) for name in ("first", "second"))

    def networks(*args: str) -> dict[str, str]:
        return dict(settings_of(make_parser(["serve"]).parse_args(["serve", *args])).networks)

    other = tmp_path / "other.py"
    other.touch()
    assert networks(first) == {}
    assert networks(first, "--network", SPEC) == {"": SPEC}
    specs = ("--network", SPEC, "--network", f"b={other}:Other")
    assert networks(first, f"b={second}", *specs) == {"": SPEC, "b": f"{other}:Other"}
    for wrong, message in (
        ((first, "--network", f"second={SPEC}"), ": first$"),
        (("m.psm", "--network", SPEC), ": none$"),
        ((first, "--network", SPEC, "--network", SPEC), "all folders, got two"),
        ((first, "--network", "net.py"), r"path/to/file\.py:ClassName"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            networks(*wrong)
    with raises(FileAccessError, param="network"):
        networks(first, "--network", f"{tmp_path}/none.py:Net")
