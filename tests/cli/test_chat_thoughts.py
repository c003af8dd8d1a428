"""Thoughts and tool calls in ``penstock chat``."""

from __future__ import annotations

import json
import sys

import pytest

from penstock import InvalidArgumentError, UnsupportedError
from penstock.cli.run.chat_session import ChatSession
from tests.support.errors import raises
from tests.support.scripted_model import scripted_llm

SPECIALS = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>"]
TOOLS = json.dumps([{"name": name, "parameters": {"type": "object"}} for name in ("weather", "now")])


def called(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def terminal(capsys):
    """The text that is written to a terminal since the last look."""
    return lambda: capsys.readouterr().out


@pytest.fixture
def chat(monkeypatch):
    """Begins a chat with a model at a terminal."""

    def begin(llm):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("TERM", "xterm")
        return ChatSession(llm, "", {}, drops_oldest=True)

    return begin


@pytest.mark.parametrize("is_terminal", [True, False])
def test_thoughts_are_dim_on_a_terminal(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "xterm")
    with scripted_llm({0: "so\n</think>\n\nyes"}, "</think>", opening="<think>\n") as llm:
        session = ChatSession(llm, "", {}, drops_oldest=True)
        session.say("x")
    shown = "\x1b[2mso\x1b[22m\n\nyes\n" if is_terminal else "so\n</think>\n\nyes\n"
    assert capsys.readouterr().out == shown


def test_thoughts_are_folded(chat, terminal):
    with scripted_llm({0: "so\n</think>\n\nyes"}, "</think>", opening="<think>\n") as llm:
        session = chat(llm)
        session.command("/thoughts off")
        session.say("x")
        shown = terminal()
        assert shown.startswith("\x1b[2mThinking ... ")
        assert shown.endswith("s\x1b[22m\n\nyes\n")
        session.command("/thoughts on")
        session.say("x")
        assert terminal() == "\x1b[2mso\x1b[22m\n\nyes\n"
        with raises(InvalidArgumentError):
            session.command("/thoughts maybe")


def test_json_follows_the_thoughts(chat, terminal):
    """The form of an answer does not hold for the thoughts that the template begins."""
    with scripted_llm({0: 'so\n</think>\n\n{"a": 1}'}, "</think>", opening="<think>\n") as llm:
        session = chat(llm)
        session.command("/json")
        session.say("x")
    assert terminal() == '\x1b[2mso\x1b[22m\n\n{"a": 1}\n'


@pytest.mark.parametrize("is_terminal", [True, False])
def test_thoughts_in_special_tokens_are_apart(is_terminal, monkeypatch, capsys):
    answer = "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>yes"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "xterm")
    with scripted_llm({0: answer}, "<|channel|> <|message|>", SPECIALS) as llm:
        session = ChatSession(llm, "", {}, drops_oldest=True)
        session.say("x")
    assert capsys.readouterr().out == ("\x1b[2mso\x1b[22m\n\nyes\n" if is_terminal else "so\n\nyes\n")


def test_tools_are_called_and_answered(chat, terminal, tmp_path):
    scripts = {0: f"One moment.{called('weather', {'city': 'Zug'})}\n{called('now', {})}", 2: "It rains."}
    with scripted_llm(scripts, "<tool_call>") as llm:
        session = chat(llm)
        session.command(f"/tools {TOOLS}")
        session.say("x")
        assert terminal() == 'One moment.\x1b[2m\n-> weather(city="Zug")\n-> now()\x1b[22m\n'
        session.say("rain")
        session.say("noon")
        assert terminal() == "It rains.\n"
        session.command(f"/save {tmp_path / 'chat.json'}")
        messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "assistant"]
        assert [message["content"] for message in messages[2:]] == ["rain", "noon", "It rains."]
        ids = [call["id"] for call in messages[1]["tool_calls"]]
        assert [message["tool_call_id"] for message in messages[2:4]] == ids
        session.command("/undo")
        session.say("x")  # a message again, not a result
        assert "weather" in terminal()


CALLS = {0: f"{called('weather', {})}\n{called('now', {})}", 2: "It rains."}


def test_a_retry_forgets_the_results_that_were_typed(chat, terminal):
    with scripted_llm(CALLS, "<tool_call>") as llm:
        session = chat(llm)
        session.command(f"/tools {TOOLS}")
        session.say("x")
        session.say("of the first answer")
        session.command("/retry")
        session.say("rain")
        session.say("noon")
        assert terminal().endswith("It rains.\n")
        messages = session._conversation.messages
        assert [message["content"] for message in messages if message["role"] == "tool"] == ["rain", "noon"]


def test_results_that_were_typed_survive_an_error(chat, terminal):
    with scripted_llm(CALLS, "<tool_call>") as llm:
        session = chat(llm)
        session.command(f"/tools {TOOLS}")
        session.say("x")
        session.say("rain")
        with raises(InvalidArgumentError, code="context_length_exceeded"):
            session.say("z" * 5000)
        session.say("noon")
        messages = session._conversation.messages
        assert [message["content"] for message in messages if message["role"] == "tool"] == ["rain", "noon"]


def test_a_saved_chat_keeps_its_tools(chat, terminal, tmp_path):
    file = tmp_path / "chat.json"
    with scripted_llm(CALLS, "<tool_call>") as llm:
        session = chat(llm)
        session.command(f"/tools {TOOLS}")
        session.say("x")
        session.command(f"/save {file}")
        other = chat(llm)
        other.command(f"/load {file}")
        other.say("rain")
        other.say("noon")
        assert terminal().endswith("It rains.\n")
        assert other._tools == session._tools
    with scripted_llm({0: "yes"}, "no format") as llm:
        session = chat(llm)
        with raises(UnsupportedError, param="tools"):
            session.command(f"/load {file}")
        session.say("x")
        assert terminal().endswith("yes\n")


def test_tools_that_cannot_be_called_are_refused(chat, terminal):
    with scripted_llm({0: "yes"}, "no format") as llm:
        session = chat(llm)
        for tools, error in ((TOOLS, UnsupportedError), ("[{}]", InvalidArgumentError), ("{", InvalidArgumentError)):
            with raises(error, param="tools"):
                session.command(f"/tools {tools}")
        session.say("x")
    assert terminal() == "yes\n"
