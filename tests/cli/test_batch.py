"""``penstock batch``: OpenAI's batch files, restarted after a kill."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil
import pytest

from penstock import LLM, SamplingParams
from penstock.cli.main import main
from penstock.cli.run import batch, batch_models, batch_sources
from penstock.cli.run.batch_sources import local_sources
from penstock.errors import FileAccessError, InvalidArgumentError, UnavailableError
from tests.support.command import DEMO, FOLDER, environment
from tests.support.errors import raises
from tests.support.waiting import until

TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}def {% endif %}"
)


def request(name: str, url: str = "/v1/completions", **body: object) -> dict[str, object]:
    body = {"model": "demo", "max_tokens": 8, "temperature": 0} | body
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(path, requests) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in requests))


def read(path) -> dict[str, dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines), "a request was done twice"
    return {line["custom_id"]: line for line in lines}


def test_results_equal_the_library_and_errors_stay_local(penstock_command, tmp_path):
    prompts = ["import os\n", "def add(a, b):", "x = [1, 2"]
    requests = [request(f"r{i}", prompt=prompt, logprobs=2) for i, prompt in enumerate(prompts)]
    requests += [
        request("hot", prompt="x", temperature=-1),
        request("odd", prompt="x", frobnicate=1),
        request("chat", url="/v1/chat/completions", messages=[{"role": "user", "content": "hi"}]),
        request("where", url="/v1/images"),
        request("got", prompt="x") | {"method": "GET"},
        request("two", prompt="x = ", n=2, temperature=1.0, seed=3, echo=True),
        request("vector", url="/v1/embeddings", input="x = ", max_tokens=None, temperature=None),
    ]
    write(tmp_path / "in.jsonl", requests)
    done = penstock_command("batch", DEMO, tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--context-len", 256)
    assert done.returncode == 1, done.stderr  # some failed
    assert "10/10 requests, 5 failed" in done.stderr
    assert "first failure: 'hot': temperature: expected" in done.stderr
    found = read(tmp_path / "out.jsonl")
    assert set(found) == {str(one["custom_id"]) for one in requests}
    with LLM(DEMO) as llm:
        for i, prompt in enumerate(prompts):
            body = found[f"r{i}"]["response"]["body"]
            expected = llm.generate(prompt, SamplingParams(max_tokens=8, temperature=0, logprobs=2))
            choice = body["choices"][0]
            assert choice["text"] == expected.text
            assert choice["logprobs"]["token_logprobs"] == [one.logprob for one in expected.logprobs]
            assert "".join(choice["logprobs"]["tokens"]).startswith(expected.text)
            assert body["usage"]["completion_tokens"] == len(expected.token_ids)
            assert body["model"] == "demo"
    messages = {"hot": "temperature", "odd": "frobnicate", "chat": "chat template", "where": "url", "got": "method"}
    for name, message in messages.items():
        assert found[name]["response"] is None
        assert message in found[name]["error"]["message"]
    again = penstock_command("batch", DEMO, tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--context-len", 256)
    assert again.returncode == 1
    assert "10 of 10 requests have a result already, 5 of them failed" in again.stderr
    two = found["two"]["response"]["body"]["choices"]
    assert [choice["index"] for choice in two] == [0, 1]
    assert all(choice["text"].startswith("x = ") for choice in two)
    vector = found["vector"]["response"]["body"]
    assert (vector["object"], vector["model"], vector["data"][0]["index"]) == ("list", "demo", 0)


def test_answers_follow_the_forms_of_their_bodies(tmp_path):
    properties = {"a": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    requests = [
        request("openai", prompt="x", response_format=form, max_tokens=80),
        request("vllm", prompt="x", structured_outputs={"choice": ["yes", "no"]}),
        request("llama.cpp", prompt="x", grammar='root ::= "a" [0-9]'),
        request("refused", prompt="x", json_schema={"not": {}}),
    ]
    write(tmp_path / "in.jsonl", requests)
    assert main(["batch", str(DEMO), str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]) == 1
    found = read(tmp_path / "out.jsonl")
    assert found.pop("refused")["error"]["param"] == "json_schema"
    texts = {name: line["response"]["body"]["choices"][0]["text"] for name, line in found.items()}
    assert isinstance(json.loads(texts["openai"])["a"], bool)
    assert texts["vllm"] in ("yes", "no")
    assert re.fullmatch("a[0-9]", texts["llama.cpp"])


def test_a_long_prompt_is_truncated_on_request(tmp_path):
    long = "x = 1\n" * 600
    requests = [
        request("whole", prompt=long),
        request("end", prompt=long, truncate_prompt=True),
        request("not", prompt=long, truncate_prompt=1),
        request("echo", prompt=long, truncate_prompt=True, echo=True),
        request("chat", url="/v1/chat/completions", messages=[], truncate_prompt=True),
        request("stream", prompt="x", stream=True),
    ]
    write(tmp_path / "in.jsonl", requests)
    assert main(["batch", str(DEMO), str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]) == 1
    found = read(tmp_path / "out.jsonl")
    body = found.pop("end")["response"]["body"]
    assert body["usage"]["prompt_tokens"] == 1024 - 8
    with LLM(DEMO) as llm:
        kept = llm.tokenizer.encode(long)[-(1024 - 8) :]
        assert body["choices"][0]["text"] == llm.generate(kept, SamplingParams(max_tokens=8, temperature=0)).text
    fields, codes = {"whole": "1024", "stream": "stream"}, {}
    for name, line in found.items():
        codes[name] = line["error"]["code"]
        assert fields.get(name, "truncate_prompt") in line["error"]["message"]
    wanted = dict.fromkeys(codes, "invalid_value") | {"whole": "context_length_exceeded"}
    assert codes == wanted, "those of the service"


def test_half_a_surrogate_pair_is_written(penstock_command, tmp_path):
    write(tmp_path / "in.jsonl", [request("\udfff", prompt="x = ", model="\ud800")])
    done = penstock_command("batch", DEMO, tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--context-len", 128)
    assert done.returncode == 0, done.stderr
    assert read(tmp_path / "out.jsonl")["\udfff"]["response"]["body"]["model"] == "\ud800"


KILLED = """
import os, signal, sys
from penstock.cli import main
from penstock.cli.run import batch
honest, lines = batch._write_whole, []
def write_whole(output, line):
    honest(output, line)
    lines.append(line)
    if len(lines) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
batch._write_whole = write_whole
main.main(sys.argv[1:])
"""


def test_a_killed_batch_continues(penstock_command, tmp_path):
    write(
        tmp_path / "in.jsonl", [request(f"r{i}", prompt=f"x = {i}", max_tokens=60, ignore_eos=True) for i in range(60)]
    )
    args = ("batch", DEMO, tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--max-requests", 4, "--context-len", 128)
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", KILLED, *map(str, args)]
    assert subprocess.run(command, capture_output=True, env=environment(), check=False).returncode == -signal.SIGKILL
    before = output.read_bytes()
    assert before.count(b"\n") == 3
    output.write_bytes(before + b'{"id": "batch_req_3f')  # a line that the kill tore
    done = penstock_command(*args)
    assert done.returncode == 0, done.stderr
    assert f"{before.count(bytes([10]))} of 60 requests have a result already" in done.stderr
    assert len(read(output)) == 60
    assert output.read_bytes().startswith(before)
    again = penstock_command(*args)
    assert (again.returncode, len(read(output))) == (0, 60)


def test_chat_requests_use_the_template(penstock_command, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(FOLDER, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    messages = [{"role": "user", "content": "add two numbers"}]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 2, "max_tokens": None, "max_completion_tokens": 6}
    write(tmp_path / "in.jsonl", [request("a", url="/v1/chat/completions", **body)])
    done = penstock_command("batch", model, tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--context-len", 128)
    assert done.returncode == 0, done.stderr
    found = read(tmp_path / "out.jsonl")["a"]["response"]["body"]
    assert found["object"] == "chat.completion"
    choice = found["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert all(len(one["top_logprobs"]) == 2 for one in choice["logprobs"]["content"])
    assert found["usage"]["completion_tokens"] == len(choice["logprobs"]["content"]) <= 6


def test_a_bad_line_does_not_affect_the_others(penstock_command, tmp_path):
    good = [json.dumps(request(name, prompt=[5], max_tokens=1)) for name in ("a", "b")]
    bad = {
        1: ("{", None, "line 1 is not JSON"),
        3: ("[" * 200_000, None, "line 3 is not JSON"),
        4: ('{"custom_id": 3}', None, "line 4: custom_id must be a non-empty string, not 3"),
        5: ("[1]", None, "line 5: expected an object with a custom_id"),
        6: (json.dumps(request("a", prompt=[6])), "a", "line 6: line 2 already has custom_id 'a'"),
    }
    lines = [bad[1][0], good[0], bad[3][0], bad[4][0], bad[5][0], bad[6][0], good[1], ""]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    command = ("batch", DEMO, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    done = penstock_command(*command)
    assert (done.returncode, "7/7 requests, 5 failed" in done.stderr) == (1, True), done.stderr
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    answered = {one["custom_id"]: one["response"]["status_code"] for one in results if one["error"] is None}
    assert answered == {"a": 200, "b": 200}
    failed = {one["error"]["line"]: one for one in results if one["error"] is not None}
    assert failed.keys() == bad.keys()
    for number, (_, name, message) in bad.items():
        assert failed[number]["custom_id"] == name
        assert failed[number]["response"] is None
        assert message in failed[number]["error"]["message"]
    again = penstock_command(*command)
    assert (again.returncode, "7 of 7 requests have a result already, 5 of them failed" in again.stderr) == (1, True), (
        again.stderr
    )
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 7


TORN = '{"id": "batch_req_3f'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dear diary\nnothing\n", "result of an earlier run"),
        ("my notes", "result of an earlier run"),
        ('{"id": "batch_request', "result of an earlier run"),
        ("my notes\r" + TORN, "result of an earlier run"),
        (TORN, "--max-requests"),  # a line of ours, but the model does not open
    ],
)
def test_an_output_with_other_data_is_not_changed(penstock_command, tmp_path, text, message):
    write(tmp_path / "in.jsonl", [request("a", prompt="x")])
    (tmp_path / "notes.txt").write_bytes(text.encode())
    options = ("--max-requests", -5) if message == "--max-requests" else ()
    done = penstock_command("batch", DEMO, tmp_path / "in.jsonl", tmp_path / "notes.txt", *options)
    assert (done.returncode, message in done.stderr) == (2 if text == TORN else 1, True), done.stderr
    assert (tmp_path / "notes.txt").read_bytes() == text.encode()


def test_the_input_cannot_be_the_output(penstock_command, tmp_path):
    text = json.dumps(request("a", prompt="x"))  # without an end of line, as a line that a kill cut short
    (tmp_path / "in.jsonl").write_text(text)
    (tmp_path / "same").symlink_to(tmp_path / "in.jsonl")
    done = penstock_command("batch", DEMO, tmp_path / "in.jsonl", tmp_path / "same")
    assert (done.returncode, "the output must not be the input" in done.stderr) == (2, True)
    assert (tmp_path / "in.jsonl").read_text() == text
    full = penstock_command("batch", DEMO, tmp_path / "in.jsonl", "/dev/full")
    assert (full.returncode, "/dev/full: the output must be a regular file" in full.stderr) == (1, True)


def test_the_output_is_locked(penstock_command, tmp_path):
    write(tmp_path / "in.jsonl", [request("a", prompt="x")])
    with (tmp_path / "out.jsonl").open("wb") as taken:
        fcntl.flock(taken, fcntl.LOCK_EX)
        done = penstock_command("batch", DEMO, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (done.returncode, "another process is writing" in done.stderr) == (1, True)
    assert (tmp_path / "out.jsonl").read_bytes() == b""


@pytest.mark.parametrize("options", [(), ("--no-prefix-cache",)])
def test_no_prefix_cache_computes_prompts_again(penstock_command, tmp_path, options):
    write(tmp_path / "in.jsonl", [request(f"r{i}", prompt=[5] * 70 + [i]) for i in range(2)])
    args = ("batch", DEMO, tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--context-len", 128, "--max-requests", 1)
    done = penstock_command(*args, *options)
    assert done.returncode == 0, done.stderr
    usage = [one["response"]["body"]["usage"] for one in read(tmp_path / "out.jsonl").values()]
    assert sum(one["prompt_tokens_details"]["cached_tokens"] for one in usage) == (0 if options else 64)


def test_a_wrong_encoding_or_an_empty_input_is_named(tmp_path, capsys):
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_bytes((json.dumps(request("a", prompt="x")) + "\n").encode("utf-16"))
    assert main(["batch", str(DEMO), str(path), str(output)]) == 1
    assert "line 1 is not JSON: 'utf-8' codec can't decode byte 0xff" in capsys.readouterr().err
    output.unlink()
    path.write_text(json.dumps(request("a", prompt="x")), encoding="utf-8-sig")
    assert main(["batch", str(DEMO), str(path), str(output)]) == 0
    path.write_text("\n \n")
    assert main(["batch", str(DEMO), str(path), str(tmp_path / "none.jsonl")]) == 0
    assert "in.jsonl: the file has no requests" in capsys.readouterr().err


def test_a_folder_is_answered_by_workers(penstock_command, tmp_path):
    """Each file has its own results, which are those of one process; a second run has nothing to do."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a", "b"):
        write(folder / f"{name}.jsonl", [request(f"{name}{i}", prompt=f"{name} = {i}") for i in range(6)])
    write(folder / "c.jsonl", [])
    args = ("batch", DEMO, folder, tmp_path / "out", "--context-len", 128, "--max-requests", 2)
    done = penstock_command(*args, "--workers", 2, "--threads", 1)
    assert done.returncode == 0, done.stderr
    assert "c.jsonl: the file has no requests" in done.stderr
    again = penstock_command(*args, "--workers", 2)
    assert again.returncode == 0, again.stderr
    assert "6 of 6 requests have a result already" in again.stderr
    alone = penstock_command("batch", DEMO, *sorted(folder.iterdir()), tmp_path / "alone", "--context-len", 128)
    assert alone.returncode == 0, alone.stderr
    for name in ("a", "b"):
        ours, theirs = (read(tmp_path / where / f"{name}.jsonl") for where in ("out", "alone"))
        assert len(ours) == 6
        texts = [{key: line["response"]["body"]["choices"] for key, line in found.items()} for found in (ours, theirs)]
        assert texts[0] == texts[1]


def test_a_lost_worker_loses_no_request_of_a_batch(tmp_path):
    write(tmp_path / "in.jsonl", [request(f"r{i}", prompt=f"x = {i}", max_tokens=100) for i in range(60)])
    command = [sys.executable, "-m", "penstock", "batch", DEMO, tmp_path / "in.jsonl", tmp_path / "out.jsonl"]
    command += ["--workers", "2", "--threads", "1", "--max-requests", "4", "--context-len", "128"]
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True, env=environment())
    out = tmp_path / "out.jsonl"
    until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 5, "the fifth result", process=process)
    workers = [child for child in psutil.Process(process.pid).children() if "worker" in " ".join(child.cmdline())]
    assert len(workers) == 2
    workers[0].kill()
    assert process.wait() == 0
    process.stderr.close()
    assert len(read(tmp_path / "out.jsonl")) == 60


def test_workers_of_a_batch_follow_its_requests(tmp_path):
    """A second worker starts while requests wait; each request has one result."""
    write(tmp_path / "in.jsonl", [request(f"r{i}", prompt=f"x = {i}", max_tokens=100) for i in range(90)])
    command = [sys.executable, "-m", "penstock", "batch", DEMO, tmp_path / "in.jsonl", tmp_path / "out.jsonl"]
    command += ["--replicas", "1..2", "--threads", "1", "--max-requests", "2", "--context-len", "128"]
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True, env=environment())
    seen = set()
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children()
            seen |= {child.pid for child in children if "penstock.serving.workers.worker" in child.cmdline()}
        time.sleep(0.02)
    said = process.stderr.read()
    process.stderr.close()
    assert process.returncode == 0, said
    assert len(seen) == 2
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == len(read(tmp_path / "out.jsonl")) == 90


def test_an_outage_stops_a_batch_which_continues_later(tmp_path, monkeypatch, capsys):
    """The only worker is killed and the model's file is gone; with the file the same command answers the others."""
    monkeypatch.setattr(batch_models, "_PAUSE_S", 0.05)
    model, output = tmp_path / "demo.psm", tmp_path / "out.jsonl"
    shutil.copy(DEMO, model)
    write(tmp_path / "in.jsonl", [request(f"r{i}", prompt=f"x = {i}", max_tokens=100) for i in range(60)])
    command = ["batch", str(model), str(tmp_path / "in.jsonl"), str(output)]
    command += ["--workers", "1", "--threads", "1", "--max-requests", "4", "--context-len", "128"]

    def end_the_worker() -> None:
        until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 5)
        model.rename(tmp_path / "away")
        for child in psutil.Process().children():
            if "penstock.serving.workers.worker" in child.cmdline():
                child.kill()

    killer = threading.Thread(target=end_the_worker, daemon=True)
    killer.start()
    assert main(command) == 1
    killer.join()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "the batch stopped" in line]
    assert line.endswith("The results so far are kept; run the same command again to continue")
    results = read(output)
    assert 5 <= len(results) < 60
    assert all(result["error"] is None for result in results.values())
    (tmp_path / "away").rename(model)
    assert main(command) == 0
    assert output.read_bytes().count(b"\n") == len(read(output)) == 60


def test_an_outage_of_several_requests_leaves_no_error_behind(monkeypatch):
    """All open requests fail at once, and asyncio would report the tasks whose errors nobody took."""

    async def lost(*args: object) -> None:
        raise UnavailableError("gone")

    monkeypatch.setattr(batch, "_response_body", lost)
    reported: list[object] = []

    async def answer() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        lines = [batch._Line(number, f"r{number}", {}) for number in range(6)]
        with raises(UnavailableError, match="the batch stopped"):
            await batch._answer_all(batch_models.OpenModels(None, 4), lines, io.BytesIO())
        gc.collect()

    asyncio.run(answer())
    gc.collect()
    assert reported == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--workers", "-1"], "--workers: expected"),
        (["--cluster", "10.0.0.5:6379"], "--cluster requires --workers"),
        (["--place-seconds", "30"], "--place-seconds requires --cluster"),
        (["--replicas", "0..2"], "--replicas: expected an integer from 1 to 256, got 0"),
        (["--replicas", "3..2"], "--replicas: expected MIN..MAX with MIN up to MAX, got 3..2"),
        (["--replicas", "some"], "--replicas: expected N or MIN..MAX, got 'some'"),
        (["--replicas", "1..2", "--workers", "2"], "--replicas: expected no --workers"),
    ],
)
def test_wrong_worker_options_are_refused(tmp_path, capsys, options, text):
    write(tmp_path / "in.jsonl", [request("a", prompt="x")])
    assert main(["batch", str(DEMO), str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *options]) == 2
    assert text in capsys.readouterr().err


def test_folders_that_cannot_be_answered_are_refused(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    assert main(["batch", str(DEMO), str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert "expected a folder with *.jsonl files" in capsys.readouterr().err
    write(tmp_path / "in" / "a.jsonl", [])
    write(tmp_path / "a.jsonl", [])
    assert main(["batch", str(DEMO), str(tmp_path / "in"), str(tmp_path / "a.jsonl"), str(tmp_path / "out")]) == 2
    assert "expected files of different names" in capsys.readouterr().err


def test_requests_in_an_object_store_are_answered(tmp_path, monkeypatch, capsys):
    """fsspec's store in memory stands for S3, which has the same interface."""
    import fsspec

    monkeypatch.setitem(batch_sources.PROTOCOLS, "memory", "s3")
    store = fsspec.filesystem("memory")
    for name in ("one", "two"):
        write(tmp_path / name, [request(name, prompt=f"def {name}(")])
        store.pipe(f"/bucket/requests/{name}.jsonl", (tmp_path / name).read_bytes())
    try:
        assert main(["batch", str(DEMO), "memory://bucket/requests/", str(tmp_path / "answers")]) == 0
        assert sorted(path.name for path in (tmp_path / "answers").iterdir()) == ["one.jsonl", "two.jsonl"]
        pattern = "memory://bucket/requests/*.jsonl"
        assert main(["batch", str(DEMO), pattern, str(tmp_path / "matched")]) == 0
        assert sorted(path.name for path in (tmp_path / "matched").iterdir()) == ["one.jsonl", "two.jsonl"]
        store.pipe("/bucket/other/one.jsonl", b"")
        assert main(["batch", str(DEMO), "memory://bucket/*/one.jsonl", str(tmp_path / "twice")]) == 2
        assert "expected files of different names, got 'one.jsonl' twice" in capsys.readouterr().err
        single = tmp_path / "one.jsonl"
        assert main(["batch", str(DEMO), "memory://bucket/requests/one.jsonl", str(single)]) == 0
        texts = [read(path)["one"]["response"]["body"]["choices"] for path in (single, tmp_path / "answers/one.jsonl")]
        assert texts[0] == texts[1]
        assert main(["batch", str(DEMO), "memory://bucket/requests/one.jsonl", str(single)]) == 0
        assert "1 of 1 requests have a result already" in capsys.readouterr().err
    finally:
        store.rm("/bucket", recursive=True)


@pytest.mark.parametrize(
    ("source", "output", "error", "text"),
    [
        ("memory://bucket/none.jsonl", "answers", FileAccessError, "memory://bucket/none.jsonl: cannot be read"),
        ("memory://bucket/none/", "answers", InvalidArgumentError, "expected a folder with .*got none"),
        ("memory://bucket/none/*.jsonl", "answers", InvalidArgumentError, "expected a pattern of .*got none"),
        ("ftp://host/a.jsonl", "answers", InvalidArgumentError, "input: expected a path or an address with s3://"),
        ("a.jsonl", "s3://bucket/answers", InvalidArgumentError, "output: expected a local file or folder"),
    ],
)
def test_addresses_that_cannot_be_read_are_named(source, output, error, text, monkeypatch):
    monkeypatch.setitem(batch_sources.PROTOCOLS, "memory", "s3")
    with raises(error, match=text), local_sources([source], output):
        pass


def test_a_missing_library_of_a_store_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with raises(UnavailableError, match=r"reading s3:// needs a library .*\[s3\]"), local_sources(["s3://b/a"], "out"):
        pass
