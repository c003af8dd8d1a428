"""A chat at a terminal: pastes, words at the edge, and what the commands say."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest

from penstock.cli.run.message_input import MessageInput
from penstock.cli.run.word_wrap import WordWrap
from tests.support.command import DEMO, FOLDER
from tests.support.terminal import Terminal

ECHO = "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}def {% endif %}"
PASTE = "\x1b[200~{}\x1b[201~"
"""The marks that a terminal puts around a paste; it writes a line's end as a carriage return."""


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(FOLDER, folder)
    (folder / "chat_template.jinja").write_text(ECHO)
    return folder


def test_run_names_the_option_for_messages(chat_model):
    for options, is_named in (((), True), (("--chat",), False)):
        with Terminal("run", chat_model, "x", "-n", 1, "-c", 256, *options) as terminal:
            assert ("--chat asks it" in terminal.rest(120)) == is_named


def test_a_paste_of_several_lines_is_one_message(chat_model, tmp_path):
    saved = tmp_path / "talk.json"
    args = ("chat", chat_model, "-c", 256, "-n", 2, "--no-history")
    pasted = "/* add\r  two */\rint add(int a, int b);\r"
    with Terminal(*args) as terminal:
        terminal.until("> ")
        terminal.type(PASTE.format(pasted) + "\n")
        terminal.until("; context")
        terminal.until("> ")
        terminal.type('"""\n' + PASTE.format('a\rb\r"""') + "\n")
        terminal.until("; context")
        terminal.until("> ")
        terminal.type(PASTE.format("one line") + "\n")
        terminal.until("; context")
        terminal.until("> ")
        terminal.type(f"/save {saved}\n/exit\n")
        assert terminal.process.wait(timeout=300) == 0
    contents = [message["content"] for message in json.loads(saved.read_text())["messages"]]
    assert contents[::2] == [pasted.strip().replace("\r", "\n"), "a\nb", "one line"]


def test_a_paste_without_marks_is_one_message(monkeypatch):
    """A terminal whose output goes to a file: readline does not edit its lines."""
    end, theirs = os.openpty()
    try:
        os.write(end, b"a\nb\n\nc\n")
        with os.fdopen(theirs) as stdin, MessageInput(keeps_history=False) as _:
            monkeypatch.setattr(sys, "stdin", stdin)
            messages = MessageInput(keeps_history=False)
            assert messages.read() == "a\nb\n\nc"
            os.write(end, b"/exit\n")
            assert messages.read() == "/exit"
    finally:
        os.close(end)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "one two three": ["one two", "three"],
        "twelve letters": ["twelve", "letters"],
        "a  bb   cccc d": ["a  bb", "cccc d"],
        "12345678 9": ["12345678", "9"],
        "1234567890123": ["12345678", "90123"],
        "in\n  xyz uvw rst": ["in", "  xyz", "uvw rst"],
        "日本語日本": ["日本語日", "本"],
        "ab 日本語": ["ab 日本", "語"],
        "e\u0301a b\u0301b ccc d": ["e\u0301a b\u0301b", "ccc d"],
        "a\tb c": ["a", "b c"],
    }.items(),
)
def test_words_are_not_broken_at_the_edge(text, expected, size):
    wrap = WordWrap(8)
    written = "".join(wrap.feed(text[start : start + size]) for start in range(0, len(text), size))
    lines = [""]
    for part in written.replace("\x1b[K", "").split("\n"):
        head, *moves = part.split("\x1b[")
        lines[-1] += head
        for move in moves:
            column, _, rest = move.partition("G")
            lines[-1] = lines[-1][: _index_of(lines[-1], int(column) - 1)] + rest
        lines.append("")
    assert [line.rstrip() for line in lines[:-1]] == expected


def _index_of(line: str, column: int) -> int:
    """Return the index of the character at a column; only combining characters have no width in these lines."""
    return next(i for i in range(len(line) + 1) if len(line[:i].replace("\u0301", "")) == column)


def test_an_answer_is_wrapped_only_on_a_terminal(penstock_command):
    args = ("chat", DEMO, "-c", 256, "-n", 60, "--temperature", 0, "--ignore-eos", "--no-history")
    plain = penstock_command(*args, stdin="import os\n").stdout
    with Terminal(*args, COLUMNS="8") as terminal:
        terminal.until("> ")
        terminal.type("import os\n")
        shown = terminal.until("[60 tokens")
    assert "import o\x1b[8G\x1b[K\r\nos\r\nimport o\x1b[8G" in shown
    assert plain.startswith("\nimport os\nimport os\n")


def test_help_lists_what_the_model_has(penstock_command, chat_model):
    lists = {
        model: penstock_command("chat", model, "-c", 64, stdin="/help\n/savee x\n").stderr
        for model in (DEMO, chat_model)
    }
    for name in ("/system", "/clear", "/undo", "/save", "/load"):
        assert f"\n{name} " in lists[chat_model].replace(",", " ")
        assert f"\n{name} " not in lists[DEMO].replace(",", " ")
    for name in ("/set", "/retry", "/exit"):
        assert f"\n{name} " in lists[DEMO]
    assert "/save?" in lists[chat_model]
    assert "/save?" not in lists[DEMO]


def test_files_are_named_and_not_lost(penstock_command, chat_model, tmp_path):
    args = ("chat", chat_model, "-c", 128, "-n", 2, "--temperature", 0)
    file, foreign, missing = (tmp_path / name for name in ("talk.json", "other.json", "none/talk.json"))
    foreign.write_text("mine")
    lines = f"/load {missing}\n/load {tmp_path}\nadd\n/save {missing}\n/save {foreign}\n/save {file}\n/save {file}\n"
    said = penstock_command(*args, stdin=lines).stderr
    assert f"/load: {missing}: No such file" in said
    assert f"/load: {tmp_path}: Is a directory" in said
    assert f"/save: {missing}: No such file" in said
    assert foreign.read_text() == "mine"
    first, second = (line for line in said.splitlines() if line.startswith("Saved"))
    assert "in place of" not in first
    assert "in place of" in second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.json", "talk.json"]


def test_a_repeated_greedy_answer_is_said(penstock_command, chat_model):
    for model in (DEMO, chat_model):
        lines = "/set temperature 0\nadd\n/retry\n/set temperature 1\n/set seed 3\n/retry\n/retry\n"
        said = penstock_command("chat", model, "-c", 128, "-n", 4, stdin=lines).stderr
        assert said.count("temperature 0 always chooses") == 1
        assert said.count("seed 3 repeats") == 1
