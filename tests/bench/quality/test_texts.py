"""Texts: plain files, lines of JSON, messages through the model's template, and the built-in sample."""

from __future__ import annotations

import json

import pytest

from penstock.bench.quality.texts import SAMPLE_NAME, encode_document, open_text
from penstock.errors import FileAccessError, InvalidFileError
from tests.support.errors import raises

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


class Spelling:
    """A tokenizer whose tokens are letters; the text is kept."""

    special_tokens = {"eos_token": "<e>"}  # noqa: RUF012

    def __init__(self, template: str | None) -> None:
        self.chat_template, self.chat_template_error = template, ""
        self.chat_templates = {} if template is None else {"default": template}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]


def test_the_sample_has_prose_code_and_conversations() -> None:
    source = open_text(None)
    assert source.name == SAMPLE_NAME
    assert len(source.sha256) == 64
    kinds = {type(document) for document in source.documents}
    assert kinds == {str, list}


def test_lines_of_json_are_documents(tmp_path) -> None:
    path = tmp_path / "t.jsonl"
    lines = ["one", {"text": "two", "id": 3}, {"messages": MESSAGES}, {"prompt": "a", "completion": "b"}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert open_text(path).documents == ("one", "two", MESSAGES, "ab")
    path.with_suffix(".json").write_text(json.dumps(lines))
    assert open_text(path.with_suffix(".json")).documents == ("one", "two", MESSAGES, "ab")
    path.with_suffix(".md").write_text("one\n")
    assert open_text(path.with_suffix(".md")).documents == ("one\n",)


def test_messages_go_through_the_template() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    ids = encode_document(Spelling(template), MESSAGES, True)  # type: ignore[arg-type]
    assert "".join(map(chr, ids)) == "<user>Hi<e><assistant>Hello<e>"
    plain = encode_document(Spelling(None), MESSAGES, True)  # type: ignore[arg-type]
    assert "".join(map(chr, plain)) == "user: Hi\n\nassistant: Hello"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b'{"text": 1}', "invalid_text_line"),
        (b'"a"\n7', "invalid_text_line"),
        (b'{"content": "a"}', "invalid_text_line"),
        (b'{"text": ', "invalid_json"),
        (b'"\xff"', "invalid_file"),
        (b"", "text_too_short"),
        (b'""', "text_too_short"),
    ],
)
def test_a_damaged_text_is_refused(tmp_path, data, code) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(data)
    with raises(InvalidFileError, param="text", code=code):
        open_text(path)


def test_a_missing_text_is_refused(tmp_path) -> None:
    with raises(FileAccessError, param="text", code="file_access"):
        open_text(tmp_path / "none.txt")
