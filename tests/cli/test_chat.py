"""``penstock chat``: messages from standard input, answers on standard output."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import sys

import pytest

from penstock import LLM, InternalError, SamplingParams, Stream, UnsupportedError
from penstock.cli.main import main
from penstock.text.chat_template import TurnTokens
from tests.support.command import DEMO, FOLDER, start
from tests.support.encoders import LIMITS, build
from tests.support.errors import raises
from tests.support.terminal import Terminal

TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}def {% endif %}"
)

MARKED = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>\n"
    "{% endif %}"
)
"""Here the messages of a turn begin as the prompt of the turn before and its answer did."""


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(FOLDER, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_a_model_without_a_template_completes_text(penstock_command):
    lines = "/set temperature=0\n/set max_tokens 12\nimport os\\\nimport \n/settings\n/exit\n"
    done = penstock_command("chat", DEMO, "--context-len", 256, stdin=lines)
    assert done.returncode == 0, done.stderr
    with LLM(DEMO) as llm:
        expected = llm.generate("import os\nimport ", SamplingParams(max_tokens=12, temperature=0))
    assert done.stdout == expected.text + "\n"
    assert "no chat template. It completes your text" in done.stderr
    assert f"{DEMO}, w8a8" in done.stderr
    assert "context of 256 tokens" in done.stderr
    assert re.search(r"\[12 tokens at [0-9.,]+ tokens/s, first token after [0-9.]+ m?s; context", done.stderr)
    num_tokens = len(expected.prompt_token_ids) + len(expected.token_ids)
    assert f"temperature 0, max_tokens 12; context: {num_tokens} of 256 tokens" in done.stderr


def test_the_banner_names_the_ranks(penstock_command):
    done = penstock_command("chat", DEMO, "--tp", 2, "--threads", 1, "--context-len", 256, stdin="/exit\n")
    assert done.returncode == 0, done.stderr
    assert f"{DEMO}, w8a8, 2 ranks of 1 thread, context of 256 tokens" in done.stderr


def test_an_encoder_cannot_chat(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    build(transformers.AutoModel, "bert").save_pretrained(tmp_path / "vectors")
    assert main(["chat", str(tmp_path / "vectors")]) == 1
    assert "no language-model head: it has no logits of tokens. Use embed" in capsys.readouterr().err
    build(transformers.AutoModelForMaskedLM, "bert").save_pretrained(tmp_path / "masked")
    assert main(["chat", str(tmp_path / "masked")]) == 1
    assert "attention is not causal, so it cannot continue a text" in capsys.readouterr().err
    llm, refused = LLM(str(tmp_path / "vectors"), limits=LIMITS), "no language-model head"
    with llm, raises(UnsupportedError, param="model", match=refused):
        llm.generate([1, 2, 3], max_tokens=8)


@pytest.mark.long
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
    lines = "/frob\n/temperature 1\n/set temprature 1\n/set temperature hot\n/set n 2\n/system x\n/retry\n"
    lines += "/set max_tokens 2\n"
    lines += "".join(f"/set logit_bias {'[' * depth}{']' * depth}\n" for depth in (3000, 900))
    lines += "/set echo true\n/set logprobs 1\n/set prompt_logprobs 1\nx\n"
    done = penstock_command("chat", DEMO, "--context-len", 64, stdin=lines)
    assert done.returncode == 0
    for message in (
        "unknown command /frob",
        "unknown command /temperature; did you mean /set temperature?",
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
    assert {"interrupted": "Stopped.", "failed": "planted"}[trouble] in said.err
    assert said.out.startswith(expected[0] + "\n")
    assert said.out.endswith(f"{expected[0]}\n{expected[1]}\n")


def test_an_endless_completion_stops_at_the_default(penstock_command):
    done = penstock_command("chat", DEMO, stdin="/set temperature 0\n/set ignore_eos true\nimport os\n/settings\n")
    with LLM(DEMO) as llm:
        num_prompt = len(llm.tokenizer.encode("import os"))
    assert f"context: {num_prompt + 256} of 1024 tokens" in done.stderr


@pytest.mark.long
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


@pytest.mark.long
def test_a_full_context_drops_the_oldest_turns(penstock_command, chat_model):
    lines = "/set max_tokens 20\n/set ignore_eos true\n" + "add two numbers\n" * 12 + "/settings\n"
    args = ("chat", chat_model, "--system", "be brief", "--context-len", 256)
    done = penstock_command(*args, stdin=lines)
    assert done.returncode == 0, done.stderr
    assert "at the beginning of the conversation were dropped" in done.stderr
    assert "but the context holds" not in done.stderr
    assert done.stdout.count("\n") >= 12
    refused = penstock_command(*args, "--keep-oldest", stdin=lines)
    assert "but the context holds 256" in refused.stderr


def test_the_sampling_options_are_those_of_run(penstock_command, chat_model):
    options = ("--temperature", "0.8", "--seed", "0", "-n", "6", "--top-k", "5", "--stop", "zzz", "--ignore-eos")
    done = penstock_command("chat", chat_model, "-c", 256, *options, stdin="add\n/settings\n")
    params = SamplingParams(temperature=0.8, seed=0, max_tokens=6, top_k=5, stop="zzz", ignore_eos=True)
    with LLM(chat_model) as llm:
        expected = llm.chat([{"role": "user", "content": "add"}], params).text
    assert done.stdout == f"{expected}\n"
    assert "temperature 0.8" in done.stderr
    refused = penstock_command("chat", chat_model, "--temperature", "-1", stdin="add\n")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--temperature" in refused.stderr


def test_answers_have_a_default_length(penstock_command, chat_model):
    lines = "/set ignore_eos true\nadd\n"
    done = penstock_command("chat", chat_model, "-c", 256, stdin=lines)
    assert "Answers of up to 128 tokens" in done.stderr
    assert "The answer reached its limit of 128 tokens" in done.stderr


@pytest.mark.long
def test_undo_removes_the_last_turn(penstock_command, chat_model):
    args = ("chat", chat_model, "-c", 256, "--temperature", 0, "-n", 8)
    done = penstock_command(*args, stdin="add\nmore\n/undo\nmore\n/undo\n/undo\n/undo\nadd\n")
    answers = done.stdout.splitlines()
    once = penstock_command(*args, stdin="add\nmore\n").stdout.splitlines()
    half = len(once) - len(penstock_command(*args, stdin="add\n").stdout.splitlines())
    assert answers[: len(once)] == once
    assert answers[len(once) : len(once) + half] == once[-half:]  # the same answer to the same messages
    assert "/undo: there is no message to remove" in done.stderr


def test_a_conversation_can_be_saved_and_loaded(penstock_command, chat_model, tmp_path):
    args = ("chat", chat_model, "-c", 256)
    file = tmp_path / "talk.json"
    lines = f"/set temperature 0\n/set max_tokens 8\nadd\n/save {file}\n/save {file}\nmore\n"
    done = penstock_command(*args, "--system", "be brief", stdin=lines)
    saved = json.loads(file.read_text())
    assert [message["role"] for message in saved["messages"]] == ["system", "user", "assistant"]
    assert saved["sampling"] == {"temperature": 0, "max_tokens": 8}
    again = penstock_command(*args, stdin=f"/load {file}\nmore\n/clear\n/settings\n/save {file}\n")
    assert done.stdout.endswith(again.stdout)
    assert again.stdout.strip()
    assert "temperature 0, max_tokens 8" in again.stderr
    refused = penstock_command(*args, stdin=f"/save {file}\n/load {chat_model / 'config.json'}\n/load\n/load none\n")
    for message in ("exists already", "is not a conversation", "expected a file name", "No such file"):
        assert message in refused.stderr
    assert refused.returncode == 0


def test_a_terminal_has_history_and_leaves_at_the_second_ctrl_c(tmp_path):
    args = ("chat", DEMO, "-c", 256, "-n", 4)
    with Terminal(*args, XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.until("> ")
        terminal.type("import os\n")
        terminal.until("; context")
        terminal.until("> ")
        terminal.interrupt(lambda: terminal.shows("Ctrl-C again"))
        terminal.until("> ")
        terminal.interrupt(lambda: terminal.process.poll() is not None)
        assert terminal.process.wait() == 0
    history = tmp_path / "penstock" / "chat_history"
    assert history.read_text() == "import os\n"
    assert history.stat().st_mode & 0o777 == 0o600
    with Terminal(*args, XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.until("> ")
        terminal.type("\x1b[A")  # the arrow key
        terminal.until("import os")
        terminal.type("\n")
        terminal.until("; context")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=300) == 0
