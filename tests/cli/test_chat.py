"""``penstock chat``: messages from standard input, answers on standard output."""

from __future__ import annotations

import shutil
import signal

import pytest

from penstock import LLM, SamplingParams
from tests.cli.conftest import DEMO, FOLDER, start

TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}def {% endif %}"
)


@pytest.fixture
def chat_model(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "model"


def test_a_model_without_a_template_completes_text_and_says_so(penstock_command):
    lines = "/set temperature 0\n/set max_tokens 12\nimport os\\\nimport \n/settings\n/exit\n"
    done = penstock_command("chat", DEMO, "--context-len", 256, stdin=lines)
    assert done.returncode == 0, done.stderr
    with LLM(DEMO) as llm:
        expected = llm.generate("import os\nimport ", SamplingParams(max_tokens=12, temperature=0))
    assert done.stdout == expected.text + "\n"
    assert "no chat template: it completes your text" in done.stderr
    num_tokens = len(expected.prompt_token_ids) + len(expected.token_ids)
    assert f"temperature 0, max_tokens 12; context: {num_tokens} of 256 tokens" in done.stderr


def test_a_conversation_remembers_and_starts_again(penstock_command, chat_model):
    turns = ["add", "and subtract"]
    lines = '/set temperature 0\n/set max_tokens 8\nadd\n"""\nand subtract\n"""\n/retry\n/reset\nadd\n'
    done = penstock_command("chat", chat_model, "--system", "be brief", "--context-len", 256, stdin=lines)
    assert done.returncode == 0, done.stderr
    messages, answers = [{"role": "system", "content": "be brief"}], []
    with LLM(chat_model) as llm:
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            answers.append(llm.chat(messages, SamplingParams(max_tokens=8, temperature=0)).text)
            messages.append({"role": "assistant", "content": answers[-1]})
    assert done.stdout == "".join(f"{answer}\n" for answer in (*answers, answers[1], answers[0]))


def test_mistakes_are_named_and_the_conversation_goes_on(penstock_command):
    lines = "/frob\n/set temprature 1\n/set temperature hot\n/set n 2\n/system x\n/retry\n/set max_tokens 2\nx\n"
    done = penstock_command("chat", DEMO, "--context-len", 64, stdin=lines)
    assert done.returncode == 0
    for message in ("no command /frob", "'temprature'", "temperature must be", "n and best_of", "system: ", "retry: "):
        assert message in done.stderr
    assert done.stdout


def test_ctrl_c_stops_the_answer_and_not_the_conversation():
    process = start("chat", DEMO, stdin=-1)
    process.stdin.write(b"/set ignore_eos true\nimport os\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(b"/set max_tokens 2\n/settings\n", timeout=60)
    assert process.returncode == 0, stderr
    assert b" ...\n" in stdout
    assert b"max_tokens 2" in stderr
    assert b"Traceback" not in stderr
