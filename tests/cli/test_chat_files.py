"""``/save`` and ``/load`` in ``penstock chat``: no file is lost, and each error names the command and the file."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import LLM, PenstockError
from penstock.cli.run.chat_session import ChatSession
from tests.support.command import FOLDER

MESSAGES = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "(a, b)"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = shutil.copytree(FOLDER, tmp_path_factory.mktemp("chat") / "model")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with LLM(folder, context_len=64) as opened:
        yield opened


@pytest.fixture
def session(llm: LLM) -> ChatSession:
    return ChatSession(llm, "", {"temperature": 0}, drops_oldest=False)


def refusal(session: ChatSession, command: str, path: Path) -> PenstockError:
    """The error of a command; it names the command and the path."""
    with pytest.raises(PenstockError) as raised:
        getattr(session, f"_{command}")(str(path))
    assert f"/{command}: {path}" in str(raised.value)
    return raised.value


def test_a_file_of_others_is_not_replaced(session: ChatSession, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    session._save(str(file))
    session._save(str(file))  # its own
    file.write_text("changed by others")
    os.utime(file, ns=(1, 1))
    link = tmp_path / "link.json"
    link.symlink_to(file)
    for path in (file, link, tmp_path):
        refusal(session, "save", path)
    assert file.read_text() == "changed by others"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "talk.json"]


@pytest.mark.parametrize("call", ["write", "replace"])
def test_a_full_disk_leaves_the_earlier_file(session: ChatSession, tmp_path: Path, monkeypatch, call: str) -> None:
    file = tmp_path / "talk.json"
    session._save(str(file))
    before = file.read_bytes()

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fchmod" if call == "write" else "os.replace", fails)
    assert refusal(session, "save", file).code == "file_access"
    assert file.read_bytes() == before
    assert [*tmp_path.iterdir()] == [file]


def test_a_file_that_cannot_be_read_is_named(session: ChatSession, tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "talk.json"
    file.write_text(json.dumps({"messages": MESSAGES}))
    refusal(session, "load", tmp_path)
    refusal(session, "load", tmp_path / "none.json")
    refusal(session, "load", file / "below")

    def fails(_: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", fails)
        assert refusal(session, "load", file).code == "file_access"
    session._load(str(file))
    assert session._conversation.messages == MESSAGES


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "7",
        "null",
        "\xff",
        "[" * 100_000,
        "{}",
        '{"messages": null}',
        '{"messages": {"role": "user"}}',
        '{"messages": "text"}',
        '{"messages": 7}',
        '{"messages": [7]}',
        '{"messages": [{}]}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": 7}]}',
        '{"messages": [{"role": [], "content": "x"}]}',
        '{"messages": [], "sampling": []}',
        '{"messages": [], "sampling": {"temperature": "hot"}}',
        '{"messages": [], "sampling": {"none": 1}}',
        '{"messages": [], "sampling": {"n": 2}}',
        '{"messages": [], "tools": 7}',
        '{"messages": [], "tools": [{}]}',
    ],
)
def test_a_malformed_file_changes_nothing(session: ChatSession, tmp_path: Path, content: str) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps({"messages": MESSAGES}))
    bad.write_text(content, encoding="latin-1")
    session._load(str(good))
    refusal(session, "load", bad)
    assert session._conversation.messages == MESSAGES
    assert session._settings == {}


def test_answers_follow_a_schema_until_it_is_switched_off(session: ChatSession, tmp_path: Path, capsys) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema | {"additionalProperties": False}))
    for argument in (str(tmp_path / "schema.json"), json.dumps(schema | {"additionalProperties": False})):
        session.command(f"/json {argument}")
        session.say("add")
        assert json.loads(session._answer)["a"] in ("x", "y")
    for wrong, param in (
        ('{"not": {}}', "json_schema"),
        ("[1]", "json_schema"),
        (str(tmp_path / "none"), "json_schema"),
    ):
        with pytest.raises(PenstockError) as raised:
            session.command(f"/json {wrong}")
        assert raised.value.param == param
    assert "json_schema" in session._settings  # that before the refused ones
    session.command("/json")
    assert session._settings == {"temperature": 0, "json_object": True}
    session.command("/json off")
    assert session._settings == {"temperature": 0}


def test_a_schema_of_several_lines_is_shown_in_one(session: ChatSession, tmp_path: Path, capsys) -> None:
    schema = {"type": "object", "properties": {f"name{index}": {"type": "null"} for index in range(20)}}
    (tmp_path / "schema.json").write_text(json.dumps(schema, indent=2) + "\n")
    session.command(f"/json {tmp_path / 'schema.json'}")
    captured = capsys.readouterr()
    (line,) = (captured.out + captured.err).splitlines()
    assert 'json_schema { "type": "object", "properties": { "name0"' in line
    assert "\N{HORIZONTAL ELLIPSIS}; context: " in line
    session.command("/json off")
