"""A model opened as the command line says."""

from __future__ import annotations

from penstock.cli.main import make_parser
from penstock.cli.options import open_llm
from tests.support.command import DEMO


def test_a_step_has_a_token_for_each_of_many_requests():
    args = make_parser(["run"]).parse_args(["run", str(DEMO), "x", "--context-len", "64"])
    with open_llm(args, max_requests=700) as llm:
        assert llm.engine.scheduler.max_tokens == llm.engine.scheduler.max_requests == 700
