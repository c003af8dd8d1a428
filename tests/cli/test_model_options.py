"""A model opened as the command line says."""

from __future__ import annotations

import contextlib

import pytest

from penstock.cli.main import make_parser
from penstock.cli.options import open_llm
from tests.support.command import DEMO


def test_a_step_has_a_token_for_each_of_many_requests():
    args = make_parser(["run"]).parse_args(["run", str(DEMO), "x", "--context-len", "64"])
    with open_llm(args, max_requests=700) as llm:
        assert llm.engine.scheduler.max_tokens == llm.engine.scheduler.max_requests == 700


@pytest.mark.parametrize("command", [("run", "TEXT"), ("inspect",)])
def test_a_similar_path_is_proposed(command: tuple[str, ...], penstock_inline, tmp_path):
    (tmp_path / "model.psm").touch()
    (tmp_path / "other").touch()
    with contextlib.chdir(tmp_path.parent):
        done = penstock_inline(command[0], f"{tmp_path.name}/model.psn", *command[1:])
        other = penstock_inline(command[0], f"{tmp_path.name}/wholly", *command[1:])
    assert done.returncode in (1, 2)
    assert f"on this machine. Did you mean {tmp_path.name}/model.psm? " in done.stderr
    assert "Did you mean" not in other.stderr
