"""``penstock run``: text on stdout, figures on stderr, one line for an error."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock import LLM, ProgramLimits, SamplingParams
from penstock.checkpoint.tokenizer_files.names import VOCABULARY_FILES
from penstock.cli.run.run import check_tokenizer
from penstock.errors import UnsupportedError
from tests.support.command import DEMO, FOLDER, environment, start
from tests.support.slow_network import write_script
from tests.support.waiting import until

PROMPT = "def add(a, b):\n    return"


def test_run_streams_the_text_that_the_api_makes(penstock_command):
    done = penstock_command("run", DEMO, PROMPT, "--max-tokens", 16, "--temperature", 0)
    assert done.returncode == 0, done.stderr
    with LLM(DEMO) as llm:
        expected = llm.generate(PROMPT, SamplingParams(max_tokens=16, temperature=0))
    assert done.stdout == expected.text + "\n"
    figures = done.stderr.strip().splitlines()
    assert len(figures) == 2
    for word in ("16 tokens at", "tokens/s", "first token after", "prompt of 9 tokens", "the limit of --max-tokens"):
        assert word in figures[0]
    for word in ("model loaded in", "scheme w8a8", "threads", "MB of memory"):
        assert word in figures[1]


def test_answers_follow_a_schema_a_choice_or_a_grammar(penstock_command, tmp_path):
    """A schema and a grammar are files, or the text itself."""
    schema, grammar = '{"type": "boolean"}', "root ::= [0-9] [a-c]\n"
    (tmp_path / "schema.json").write_text(schema)
    (tmp_path / "root.gbnf").write_text(grammar)
    for option, value, pattern in (
        ("--json-schema", schema, "true|false"),
        ("--json-schema", tmp_path / "schema.json", "true|false"),
        ("--grammar", tmp_path / "root.gbnf", "[0-9][a-c]"),
        ("--choice", "maybe", "maybe"),
    ):
        done = penstock_command("run", DEMO, PROMPT, option, value)
        assert re.fullmatch(pattern, done.stdout.strip()), done.stderr
    for value in (tmp_path / "none.json", '{"not": {}}'):
        done = penstock_command("run", DEMO, PROMPT, "--json-schema", value)
        assert done.returncode != 0
        assert "json-schema" in done.stderr.replace("_", "-")
        assert "Traceback" not in done.stderr


def test_json_prints_one_object(penstock_command):
    done = penstock_command("run", DEMO, PROMPT, "--max-tokens", 8, "--seed", 7, "--temperature", 0.8, "--json")
    found = json.loads(done.stdout)
    assert found["finish_reason"] in ("length", "stop")
    assert 1 <= len(found["token_ids"]) <= 8
    assert found["seed"] == 7
    for name in ("load_s", "first_token_s", "decode_tokens_per_s", "total_s", "queued_s", "peak_rss_bytes"):
        assert found["timings"][name] >= 0
    again = penstock_command("run", DEMO, PROMPT, "--max-tokens", 8, "--seed", 7, "--temperature", 0.8, "--json")
    assert json.loads(again.stdout)["token_ids"] == found["token_ids"]
    assert json.loads(again.stdout)["text"] == found["text"]


def test_threads_and_key_types_are_honoured(penstock_command):
    args = ("run", DEMO, PROMPT, "--max-tokens", 8, "--temperature", 0, "--json")
    one = json.loads(penstock_command(*args, "--threads", 1).stdout)
    two = json.loads(penstock_command(*args, "--threads", 2, "--context-len", 128).stdout)
    assert one["token_ids"] == two["token_ids"]
    assert penstock_command(*args, "--kv-cache", "int8").returncode == 0


def test_weights_can_be_copied_into_huge_pages(penstock_command):
    args = ("run", DEMO, PROMPT, "--max-tokens", 8, "--temperature", 0)
    mapped, copied = penstock_command(*args), penstock_command(*args, "--weights", "huge")
    assert copied.stdout == mapped.stdout
    assert "weights copied in" in copied.stderr
    assert "copied" not in mapped.stderr
    timings = json.loads(penstock_command(*args, "--weights", "huge", "--json").stdout)["timings"]
    assert timings["populate_s"] > 0
    refused = penstock_command("run", FOLDER, PROMPT, "--mode", "eager", "--weights", "huge")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "weights: expected mmap in eager mode" in refused.stderr


def test_the_prompt_can_come_from_standard_input(penstock_command):
    piped = penstock_command("run", DEMO, "-", "--max-tokens", 8, "--temperature", 0, stdin=PROMPT)
    given = penstock_command("run", DEMO, PROMPT, "--max-tokens", 8, "--temperature", 0)
    assert piped.stdout == given.stdout


def test_a_stop_string_ends_the_text(penstock_command):
    args = ("run", DEMO, PROMPT, "--max-tokens", 60, "--temperature", 0, "--ignore-eos", "--json")
    whole = json.loads(penstock_command(*args).stdout)["text"]
    stop = whole[10:13]
    cut = json.loads(penstock_command(*args, "--stop", stop).stdout)
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens"),
        (["--temperature", "-1"], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--top-k", "-3"], "--top-k"),
        (["--top-p", "1.5"], "--top-p"),
        (["--seed", "-9223372036854775809"], "--seed"),
        (["--stop", ""], "--stop"),
        (["--threads", "-2"], "--threads"),
        (["--context-len", "-1"], "--context-len"),
        (["--context-len", "1025"], "--context-len 1025 is more than the model's 1024"),
        (["--scheme", "w4a8"], "--scheme"),
        (["--scheme", "w9"], "expected one of f32"),
        (["--mode", "eager"], "eager"),
        (["--network", "x.py:Net"], "network"),
        (["--chat"], "chat template"),
    ],
)
def test_a_bad_option_is_one_line_that_names_it(penstock_inline, options, message):
    done = penstock_inline("run", DEMO, "x", *options)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("penstock: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


@pytest.mark.parametrize("args", [["run"], ["fly"], ["run", "x", "y", "--max-tokens", "many"], ["run", "--what"]])
def test_wrong_usage_is_one_line_with_status_2(penstock_command, args):
    done = penstock_command(*args)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_prompts_that_do_not_fit_are_refused(penstock_command):
    empty = penstock_command("run", DEMO, "")
    assert (empty.returncode, "at least one token" in empty.stderr) == (2, True)
    long = penstock_command("run", DEMO, "-", stdin="x = 1\n" * 2000)
    assert (long.returncode, "1024" in long.stderr) == (2, True)


def test_a_prompt_is_cut_when_that_is_asked_for(penstock_command):
    args = ("run", DEMO, "-", "--truncate-prompt", "--max-tokens", 8, "--temperature", 0, "--context-len", 64)
    text = "x = 1\n" * 2000 + PROMPT
    done = penstock_command(*args, stdin=text)
    with LLM(DEMO, limits=ProgramLimits(context_len=64)) as llm:
        ids = llm.tokenizer.encode(text)
        expected = llm.generate(ids[-56:], SamplingParams(max_tokens=8, temperature=0))
    assert done.stdout == expected.text + "\n", done.stderr
    assert f"dropped the first {len(ids) - 56:,} tokens of the prompt" in done.stderr
    assert "dropped" not in penstock_command(*args, stdin=PROMPT).stderr
    refused = penstock_command(*args, "--chat", stdin="x")
    assert (refused.returncode, "--truncate-prompt cannot be combined with --chat" in refused.stderr) == (2, True)


def test_missing_and_damaged_files_are_named(penstock_command, tmp_path):
    nothing = penstock_command("run", "", "x")
    assert (nothing.returncode, "model: expected the path" in nothing.stderr) == (2, True)
    missing = penstock_command("run", tmp_path / "no.psm", "x")
    assert (missing.returncode, "no.psm" in missing.stderr) == (1, True)
    data = DEMO.read_bytes()
    for name, content in (("empty", b""), ("short", data[: len(data) // 2]), ("text", b"hello" * 100)):
        path = tmp_path / f"{name}.psm"
        path.write_bytes(content)
        for command in (["run", path, "x"], ["inspect", path]):
            done = penstock_command(*command)
            assert done.returncode == 1
            assert f"{name}.psm" in done.stderr
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 0x10
    (tmp_path / "flipped.psm").write_bytes(flipped)
    done = penstock_command("inspect", tmp_path / "flipped.psm", "--verify")
    assert (done.returncode, "flipped.psm" in done.stderr) == (1, True)
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    assert "model.gguf: version: expected 4 bytes, got 0" in penstock_command("run", gguf, "x").stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_no_harm(closed):
    command = f'exec "$0" -m penstock run "$1" x --max-tokens 2 {closed}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, DEMO], capture_output=True, text=True, env=environment(), timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_prompt_that_is_not_utf8_is_refused():
    for prompt, stdin in ((b"caf\xe9", b""), (b"-", b"caf\xe9")):
        command = [sys.executable, "-m", "penstock", "run", DEMO, prompt, "--max-tokens", "1"]
        done = subprocess.run(command, input=stdin, capture_output=True, env=environment(), timeout=600)
        assert (done.returncode, done.stderr) == (2, b"penstock: prompt is not UTF-8 text at byte 3\n")


def test_prompts_do_not_depend_on_the_locale():
    command = [sys.executable, "-m", "penstock", "run", DEMO, "é = 1", "--max-tokens", "1", "--json"]
    plain = environment(PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", LC_ALL="C")
    for env in (environment(), plain):
        done = subprocess.run(command, capture_output=True, env=env, timeout=600)
        assert done.returncode == 0, done.stderr


def test_a_full_disk_is_named_without_its_number():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "penstock", "run", DEMO, "x", "--max-tokens", "2"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), timeout=600)
    assert (done.returncode, done.stderr) == (1, "penstock: No space left on device\n")


def test_debug_shows_where_an_error_comes_from(tmp_path):
    process = start("run", tmp_path / "no.psm", "x", "--debug")
    assert b"Traceback" in process.communicate(timeout=600)[1]
    assert process.returncode == 1


@contextmanager
def in_its_answer() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A run in the middle of its answer, where it stands until somebody reads: the other end of its full pipe."""
    reader, writer = os.pipe()
    room = 20
    os.write(writer, bytes(fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096) - room))
    process = start("run", DEMO, PROMPT, "--max-tokens", 1000, "--ignore-eos", stdout=writer)
    os.close(writer)
    before = num_waiting(reader)
    until(lambda: num_waiting(reader) > before, process=process)
    try:
        yield process, reader
    finally:
        process.kill()
        process.communicate()


def num_waiting(reader: int) -> int:
    """The bytes in a pipe."""
    return struct.unpack("i", fcntl.ioctl(reader, termios.FIONREAD, bytes(4)))[0]


def test_ctrl_c_during_an_answer_exits_with_130():
    with in_its_answer() as (process, reader):
        process.send_signal(signal.SIGINT)
        with open(reader, "rb") as file:
            given = file.read().lstrip(b"\0")
        assert b"Traceback" not in process.communicate(timeout=600)[1]
        assert process.returncode == 130
        assert 0 < len(given) < 200


def test_a_closed_pipe_is_quiet():
    with in_its_answer() as (process, reader):
        os.close(reader)
        assert process.communicate(timeout=600)[1].strip() == b""
        assert process.returncode == 1


def test_version_imports_no_large_packages(penstock_command):
    assert penstock_command("--version").stdout.startswith("penstock ")
    done = penstock_command("--version", PYTHONPROFILEIMPORTTIME="1")
    for module in ("numpy", "torch", "tokenizers", "jinja2"):
        assert f" {module}\n" not in done.stderr


def test_running_a_bundle_loads_no_pytorch(penstock_command):
    done = penstock_command("run", DEMO, "x", "--max-tokens", 1, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    assert " torch\n" not in done.stderr
    assert " jinja2\n" not in done.stderr


@pytest.mark.usefixtures("own_cache")
def test_a_folder_runs_and_then_opens_from_the_cache(penstock_command):
    args = ("run", FOLDER, PROMPT, "--max-tokens", 8, "--temperature", 0, "--json")
    first = penstock_command(*args, cold=True)
    assert first.returncode == 0, first.stderr
    again = penstock_command(*args, PYTHONPROFILEIMPORTTIME="1")
    assert " torch\n" not in again.stderr
    assert json.loads(first.stdout)["token_ids"] == json.loads(again.stdout)["token_ids"]
    assert json.loads(first.stdout)["scheme"] == "bf16"
    assert "w8a8" in first.stderr
    listed = penstock_command("cache", "list").stdout
    assert "bf16" in listed
    assert os.fspath(FOLDER) in listed
    eager = json.loads(penstock_command(*args, "--mode", "eager").stdout)
    assert eager["token_ids"] == json.loads(first.stdout)["token_ids"]


@pytest.mark.long
def test_without_the_cache_nothing_is_kept(penstock_command, tmp_path, own_cache):
    (tmp_path / "tmp").mkdir()
    args = ("run", FOLDER, PROMPT, "--max-tokens", 4, "--scheme", "w8a8", "--no-cache")
    done = penstock_command(*args, TMPDIR=str(tmp_path / "tmp"))
    assert done.returncode == 0, done.stderr
    assert not own_cache.exists()
    assert list((tmp_path / "tmp").glob("penstock*")) == []


@pytest.mark.usefixtures("own_cache")
def test_interrupted_packing_leaves_no_files(tmp_path):
    network, started = write_script(tmp_path, 600)
    process = start("run", FOLDER, PROMPT, "--network", network)
    until(started.exists, process=process)
    assert list(tmp_path.glob("cache/.*"))
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=600)[1]
    assert process.returncode == 130
    assert b"Traceback" not in stderr
    assert list(tmp_path.glob("cache/*")) == []


@pytest.mark.long
def test_a_damaged_bundle_in_the_cache_is_made_anew(penstock_command, own_cache):
    args = ("run", FOLDER, "x", "--max-tokens", 1, "--temperature", 0)
    first = penstock_command(*args)
    (bundle,) = own_cache.glob("*.psm")
    bundle.write_bytes(b"\0" * bundle.stat().st_size)
    again = penstock_command(*args)
    assert (first.returncode, again.returncode) == (0, 0)
    assert again.stdout == first.stdout


@pytest.mark.parametrize("name", ["tokenizer.json", *VOCABULARY_FILES])
@pytest.mark.parametrize("home", ["", "0_Transformer"])
def test_any_vocabulary_is_a_tokenizer(name, home, tmp_path):
    folder = tmp_path / home
    folder.mkdir(exist_ok=True)
    (tmp_path / "modules.json").write_text(json.dumps([{"path": home}]))
    (folder / "config.json").write_text("{}")
    with pytest.raises(UnsupportedError):
        check_tokenizer(tmp_path)
    (folder / name).write_bytes(b"")
    check_tokenizer(tmp_path)
