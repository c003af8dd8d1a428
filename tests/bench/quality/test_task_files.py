"""Files of tasks: the forms of known data sets, configurations of lm-eval, and refusals that name the field."""

from __future__ import annotations

import json

import pytest

from penstock.bench.quality.task_files import Question, open_tasks
from penstock.errors import FileAccessError, InvalidFileError, UnsupportedError
from tests.support.errors import raises

QUESTION = {"question": "2 + 2 =", "choices": ["3", "4"], "gold": 1}
YAML = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: data.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "Q: {{question}}\\nA:"
doc_to_choice: "{{choices}}"
doc_to_target: gold
description: "Sums.\\n\\n"
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (QUESTION, Question("2 + 2 =", ("3", "4"), 1)),
        ({"query": "q", "choices": ["a", "b"], "gold": "b"}, Question("q", ("a", "b"), 1)),
        ({"question": "q", "choices": ["x", "y"], "answer": "B"}, Question("q", ("x", "y"), 1)),
        ({"ctx": "c", "endings": ["x", "y", "z"], "label": "2"}, Question("c", ("x", "y", "z"), 2)),
        (
            {"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"},
            Question("q", ("x", "y"), 1),
        ),
        (
            {"question": "q", "choices": {"text": ["x", "y"], "label": [1, 2]}, "answerKey": 2},
            Question("q", ("x", "y"), 1),
        ),
        (
            {"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": 1},
            Question("q", ("x", "y"), 0),
        ),
        (
            {"question": "q", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": 1},
            Question("q", ("x", "y"), 1),
        ),
        ({"code": "f(", "choices": [" x", "y)"], "answer": 0}, Question("f(", (" x", "y)"), 0, "")),
    ],
)
def test_lines_of_json_are_questions(tmp_path, line, expected) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text(json.dumps(line) + "\n")
    (task,) = open_tasks(path)
    assert (task.name, task.questions) == ("sums", (expected,))


@pytest.mark.parametrize(
    ("text", "choices", "target"),
    [
        ('"{{question}}"', '"{{choices}}"', "gold"),
        ("question", "choices", '"{{gold}}"'),
        ("question", '["{{choices[0]}}", "{{choices[1]}}"]', "1"),
        ('"{% if question %}{{question}}{% endif %}"', '"{{choices | list}}"', '"{{choices[gold]}}"'),
    ],
)
def test_configurations_of_lm_eval_are_read(tmp_path, text, choices, target) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(QUESTION))
    path = tmp_path / "sums.yaml"
    path.write_text(
        YAML.replace('"Q: {{question}}\\nA:"', text).replace('"{{choices}}"', choices).replace("gold", target)
    )
    (task,) = open_tasks(path)
    assert task.questions == (Question("Sums.\n\n2 + 2 =", ("3", "4"), 1),)


def test_a_text_in_brackets_is_a_template(tmp_path) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(QUESTION | {"self": 1}))
    path = tmp_path / "sums.yaml"
    path.write_text(YAML.replace("Q: {{question}}\\nA:", "[INST] {{question}} [/INST]"))
    (task,) = open_tasks(path)
    assert task.questions[0].context == "Sums.\n\n[INST] 2 + 2 = [/INST]"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ({"choices": ["a", "b"], "gold": 0}, "invalid_task"),
        ({"question": "q", "gold": 0}, "invalid_task"),
        ({"question": "q", "choices": ["a", "b"]}, "invalid_task"),
        ({"question": 3, "choices": ["a", "b"], "gold": 0}, "invalid_task"),
        ({"question": "q", "choices": ["a"], "gold": 0}, "invalid_task"),
        ({"question": "q", "choices": ["a", ""], "gold": 0}, "invalid_task"),
        ({"question": "q", "choices": ["a", "b"], "gold": 2}, "invalid_task"),
        ({"question": "q", "choices": ["a", "b"], "gold": True}, "invalid_task"),
        ({"question": "q", "choices": ["a", "b"], "gold": "c"}, "invalid_task"),
        ({"question": "q", "choices": {"text": ["a", "b"], "label": 3}, "gold": 0}, "invalid_task"),
        ({"question": "q", "choices": {"text": ["a", "b"], "label": [[], {}]}, "gold": 0}, "invalid_task"),
        ({"question": "q", "choices": {"text": ["a", "b"], "label": ["A"]}, "gold": "A"}, "invalid_task"),
        ({"question": "q", "choices": {"label": ["A", "B"]}, "gold": "A"}, "invalid_task"),
        ({"question": "q", "choices": 3, "gold": 0}, "invalid_task"),
        ({"question": "q", "choices": ["a", "b"], "gold": [1]}, "invalid_task"),
        (["q"], "invalid_task"),
    ],
)
def test_a_wrong_question_is_refused(tmp_path, line, code) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(QUESTION) + "\n" + json.dumps(line))
    if isinstance(line, list):
        path.write_text(json.dumps(QUESTION) + "\n" + "7")
    with raises(InvalidFileError, param="tasks", code=code, match="line 2"):
        open_tasks(path)


@pytest.mark.parametrize(
    ("old", "new", "error", "code"),
    [
        ("multiple_choice", "generate_until", UnsupportedError, "unsupported_task"),
        ("dataset_path: json", "dataset_path: hellaswag", UnsupportedError, "unsupported_task"),
        ("task: sums", "num_fewshot: 5", UnsupportedError, "unsupported_task"),
        ("task: sums", "process_docs: f", UnsupportedError, "unsupported_task"),
        ("task: sums", "process_docs: !function utils.f", InvalidFileError, "invalid_task"),
        ("data.jsonl", "https://host/data.jsonl", UnsupportedError, "unsupported_task"),
        ("data.jsonl", "none.jsonl", FileAccessError, "file_access"),
        ("doc_to_target: gold", "doc_to_target: '{{no_field}}'", InvalidFileError, "invalid_task"),
        ("doc_to_target: gold", "", InvalidFileError, "invalid_task"),
        ("{{choices}}", "{{question}}", InvalidFileError, "invalid_task"),
        ("{{question}}", "{{question.__class__.__mro__}}", InvalidFileError, "invalid_task"),
        ("{{question}}", "{% for", InvalidFileError, "invalid_task"),
        ("{{question}}", "{{ '{}{}'.format(question) }}", InvalidFileError, "invalid_task"),
        ("{{question}}", "{{ '%(no)s' % {} }}", InvalidFileError, "invalid_task"),
        ("{{question}}", "{{ question + 1 }}", InvalidFileError, "invalid_task"),
        ("{{question}}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", InvalidFileError, "invalid_task"),
        ("{data_files: {test: data.jsonl}}", "[data.jsonl]", InvalidFileError, "invalid_task"),
        ("{data_files: {test: data.jsonl}}", "data.jsonl", InvalidFileError, "invalid_task"),
        ("{data_files: {test: data.jsonl}}", "{data_files: 3}", UnsupportedError, "unsupported_task"),
        ("test_split: test", "test_split: [test]", InvalidFileError, "invalid_task"),
        ("data.jsonl", "x" * 5000, FileAccessError, "file_access"),
        ('"{{choices}}"', "'{[]: 1}'", InvalidFileError, "invalid_task"),
    ],
)
def test_a_wrong_configuration_is_refused(tmp_path, old, new, error, code) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(QUESTION))
    path = tmp_path / "t.yaml"
    path.write_text(YAML.replace(old, new))
    with raises(error, param="tasks", code=code):
        open_tasks(path)


def test_missing_and_empty_files_are_refused(tmp_path) -> None:
    for name in ("none.jsonl", "none.yaml"):
        with raises(FileAccessError, param="tasks", code="file_access"):
            open_tasks(tmp_path / name)
    (tmp_path / "empty.jsonl").write_text("\n")
    with raises(InvalidFileError, param="tasks", code="invalid_task"):
        open_tasks(tmp_path / "empty.jsonl")
