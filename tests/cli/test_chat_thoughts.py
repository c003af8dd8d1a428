"""Thoughts of a reasoning model in ``penstock chat``."""

from __future__ import annotations

import sys

import pytest

from penstock.cli.run.chat_session import ChatSession
from tests.support.scripted_model import scripted_llm


@pytest.mark.parametrize("is_terminal", [True, False])
def test_thoughts_are_dim_on_a_terminal(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "xterm")
    with scripted_llm({0: "so\n</think>\n\nyes"}, "</think>", opening="<think>\n") as llm:
        session = ChatSession(llm, "", {}, drops_oldest=True)
        session.say("x")
    shown = "\x1b[2mso\x1b[22m\n\nyes\n" if is_terminal else "so\n</think>\n\nyes\n"
    assert capsys.readouterr().out == shown
