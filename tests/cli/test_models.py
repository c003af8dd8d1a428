"""``penstock models``: what a running service serves, changed from a shell."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.cli.service import models as models_command
from penstock.client.admin import AdminClient
from penstock.errors import ServiceError
from tests.support.command import DEMO
from tests.support.serve_command import serving


def test_models_are_loaded_updated_and_unloaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "admin.sock"
    spaced = Path(shutil.copy(DEMO, tmp_path / "my model.psm"))

    def models(*arguments: object, status: int = 0) -> str:
        capsys.readouterr()
        assert main(["models", *map(str, arguments)]) == status
        out, err = capsys.readouterr()
        return err if status else out

    sizes = ("--max-requests", "4", "--threads", "1", "--context-len", "4096")
    with serving(f"first={DEMO}", "--admin-socket", path, *sizes, cwd=tmp_path) as (_, _, said):
        assert "context 1024 (the model's maximum; 4096 requested)" in said
        asked = ("--admin-socket", path)
        assert models(*asked).split()[:4] == ["first", "ready", "version", "1"]
        assert models(*asked) == models("list", *asked) == models(*asked, "list")
        refusal = models("load", spaced, *asked, status=1)
        assert "'my model'. Pass NAME=PATH" in refusal
        loaded = models("load", f"second={spaced}", *asked)
        assert loaded.startswith("second  ready  version 1  my model.psm, w8a8  context 1024  1 of 1 worker ready")
        assert "worker: second-1 is the only ready worker" in models("drain", "second", "second-1", *asked, status=1)
        assert "version 2" in models("update", f"second={DEMO}", *asked)
        found = json.loads(models(*asked, "--json"))
        assert [(one["id"], one["version"]) for one in found["models"]] == [("first", 1), ("second", 2)]
        assert models("unload", "second", *asked) == "second  unloaded\n"
        assert "worker: first-1 is the only ready worker" in models("drain", "first", "first-1", *asked, status=1)
        assert "'second'" in models("unload", "second", *asked, status=1)
        assert "update: expected NAME=PATH" in models("update", DEMO, *asked, status=2)
        assert "no such file" in models("load", tmp_path / "gone.psm", *asked, status=1)
        with pytest.raises(ServiceError) as refused:
            AdminClient(path).load("relative.psm")
        assert (refused.value.status, refused.value.code) == (400, "invalid_value")
        assert refused.value.request_id
        assert [line.split("  ")[1:] for line in models(*asked).splitlines()[1:]] == [
            ["first-1", "ready", "0 open requests"]
        ]
    assert "no service answers" in models("--admin-socket", tmp_path / "gone.sock", status=1)
    assert "--admin-socket is required" in models(status=2)


def test_a_worker_of_another_machine_is_listed_with_it() -> None:
    worker = {"name": "demo-1", "status": "ready", "num_open": 1, "node": ""}
    assert models_command._worker_line(worker) == "  demo-1  ready  1 open request"
    assert models_command._worker_line(worker | {"node": "10.0.0.7"}) == "  demo-1  ready  1 open request  on 10.0.0.7"
