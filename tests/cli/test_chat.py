"""``penstock chat``: messages from standard input, answers on standard output."""

from __future__ import annotations

import io
import shutil
import signal
import sys

import pytest

from penstock import LLM, InternalError, SamplingParams, Stream
from penstock.cli.main import main
from penstock.text.chat_template import TurnTokens
from tests.support.command import DEMO, FOLDER, start

TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}def {% endif %}"
)

MARKED = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>\n"
    "{% endif %}"
)
"""Here the messages of a turn begin as the prompt of the turn before and its answer did."""


@pytest.fixture
def chat_model(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "model"


def test_a_model_without_a_template_completes_text(penstock_command):
    lines = "/set temperature 0\n/set max_tokens 12\nimport os\\\nimport \n/settings\n/exit\n"
    done = penstock_command("chat", DEMO, "--context-len", 256, stdin=lines)
    assert done.returncode == 0, done.stderr
    with LLM(DEMO) as llm:
        expected = llm.generate("import os\nimport ", SamplingParams(max_tokens=12, temperature=0))
    assert done.stdout == expected.text + "\n"
    assert "no chat template. It completes your text" in done.stderr
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


def test_wrong_commands_are_named_and_the_chat_continues(penstock_command):
    lines = "/frob\n/set\n/set temprature 1\n/set temperature hot\n/set n 2\n/system x\n/retry\n/set max_tokens 2\n"
    lines += "".join(f"/set logit_bias {'[' * depth}{']' * depth}\n" for depth in (3000, 900))
    lines += "/set echo true\n/set logprobs 1\n/set prompt_logprobs 1\nx\n"
    done = penstock_command("chat", DEMO, "--context-len", 64, stdin=lines)
    assert done.returncode == 0
    for message in (
        "unknown command /frob",
        "/set: expected a field",
        "'temprature'",
        "temperature: expected",
        "n and best_of",
        "system: ",
        "/retry: ",
    ):
        assert message in done.stderr
    assert done.stderr.count("\nlogit_bias") == 2
    for name in ("echo", "logprobs", "prompt_logprobs"):
        assert f"\n{name}: not available in a chat" in done.stderr
    assert done.stdout


@pytest.mark.parametrize("text", ['"""\nimport os\nx', "import os\\\nx\\", "import os\\\nx"])
def test_the_end_of_a_file_ends_a_longer_text_too(monkeypatch, capsys, text):
    with LLM(DEMO) as llm:
        expected = llm.generate("import os\nx", SamplingParams(max_tokens=4, temperature=0)).text
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"/set temperature 0\n/set max_tokens 4\n{text}"))
    assert main(["chat", str(DEMO)]) == 0
    assert capsys.readouterr().out == f"{expected}\n"


def test_ctrl_c_stops_the_answer_and_not_the_conversation():
    process = start("chat", DEMO, stdin=-1)
    process.stdin.write(b"/set ignore_eos true\nimport os\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(b"/set max_tokens 2\n/settings\n", timeout=600)
    assert process.returncode == 0, stderr
    assert b" ...\n" in stdout
    assert b"max_tokens 2" in stderr
    assert b"Traceback" not in stderr


@pytest.mark.parametrize("trouble", ["interrupted", "failed"])
def test_a_turn_without_an_answer_is_dropped(chat_model, monkeypatch, capsys, trouble):
    """Ctrl-C while the template is rendered, and a step that fails in the middle of an answer."""
    with LLM(chat_model) as llm:
        messages = [{"role": "user", "content": "add"}]
        expected = [llm.chat(messages, SamplingParams(max_tokens=4, temperature=0)).text]
        messages += [{"role": "assistant", "content": expected[0]}, {"role": "user", "content": "more"}]
        expected.append(llm.chat(messages, SamplingParams(max_tokens=4, temperature=0)).text)
    monkeypatch.setattr(sys, "stdin", io.StringIO("/set temperature 0\n/set max_tokens 4\nadd\nBREAK\n/retry\nmore\n"))
    if trouble == "interrupted":
        honest = TurnTokens.prompt

        def prompt(self, messages):
            if messages[-1]["content"] == "BREAK":
                raise KeyboardInterrupt
            return honest(self, messages)

        monkeypatch.setattr(TurnTokens, "prompt", prompt)
    else:
        step, count = Stream.__next__, iter(range(100))

        def fail_once(self):
            if next(count) == 7:  # four pieces and the end of the first answer, one piece of the second
                raise InternalError("planted")
            return step(self)

        monkeypatch.setattr(Stream, "__next__", fail_once)
    assert main(["chat", str(chat_model), "--context-len", "256"]) == 0
    said = capsys.readouterr()
    assert {"interrupted": "Stopped. Ctrl-D", "failed": "planted"}[trouble] in said.err
    assert said.out.startswith(expected[0] + "\n")
    assert said.out.endswith(f"{expected[0]}\n{expected[1]}\n")


def test_an_endless_completion_stops_at_the_default(penstock_command):
    done = penstock_command("chat", DEMO, stdin="/set temperature 0\n/set ignore_eos true\nimport os\n/settings\n")
    with LLM(DEMO) as llm:
        num_prompt = len(llm.tokenizer.encode("import os"))
    assert f"context: {num_prompt + 256} of 1024 tokens" in done.stderr


def test_a_turn_computes_no_more_than_its_new_tokens(tmp_path, monkeypatch, capsys):
    shutil.copytree(FOLDER, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(MARKED)
    results, honest = [], Stream.result

    def result(self):
        results.append(honest(self))
        return results[-1]

    monkeypatch.setattr(Stream, "result", result)
    lines = "/set temperature 1.3\n/set seed 2\n/set max_tokens 90\nadd two numbers\nagain, please\nand again\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main(["chat", str(tmp_path / "model")]) == 0, capsys.readouterr().err
    computed = [len(one.prompt_token_ids) + len(one.token_ids) - 1 for one in results]
    assert [one.num_cached_tokens for one in results] == [0, *(number // 32 * 32 for number in computed[:2])]


def test_drop_oldest_drops_turns_of_a_full_context(penstock_command, chat_model):
    lines = "/set max_tokens 20\n/set ignore_eos true\n" + "add two numbers\n" * 12 + "/settings\n"
    args = ("chat", chat_model, "--system", "be brief", "--context-len", 256)
    done = penstock_command(*args, "--drop-oldest", stdin=lines)
    assert done.returncode == 0, done.stderr
    assert "The context is full. The oldest" in done.stderr
    assert "but the context holds" not in done.stderr
    assert done.stdout.count("\n") >= 12
    refused = penstock_command(*args, stdin=lines)
    assert "but the context holds 256" in refused.stderr
    without = penstock_command("chat", DEMO, "--drop-oldest", stdin="x\n")
    assert (without.returncode, "--drop-oldest: the model has no chat template" in without.stderr) == (2, True)
