"""``penstock serve FOLDER``: servables beside language models, over the doors, watched, and ended with the service."""

from __future__ import annotations

import http.client
import json
import shlex
import shutil
import signal
import subprocess
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from penstock.cli.main import make_parser
from penstock.cli.serve import settings_of
from penstock.engine.llm import LLM
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError
from tests.cli.conftest import DEMO
from tests.cli.test_serve import ask, serving
from tests.serving.servables.folders import write
from tests.serving.service import until

STORY = """
    own = servable.language_model("story.psm", max_tokens=8, temperature=0.0)
    beside = servable.language_model(served="demo", max_tokens=8, temperature=0.0)

    @servable.stage(outputs={"prompt": "TEXT[]"})
    def before(name):
        if not name.isidentifier(): raise servable.InputError("a name is expected")
        if name == "hang": time.sleep(1000)
        print("a line of", name)
        return f"def {name}("

    @servable.stage(outputs={"code": "TEXT[]", "length": "INT64[]"})
    def after(prompt, one, two):
        assert one == two
        return prompt + one, len(one)

    @servable.method(inputs={"name": "TEXT[]"}, outputs={"code": "TEXT[]", "length": "INT64[]"})
    def function(name):
        prompt = before(name)
        return after(prompt, own(prompt), beside(prompt))
"""


def refused(url: str, path: str, body: dict[str, object]) -> tuple[int, str]:
    with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=600)) as link:
        link.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = link.getresponse()
        return answer.status, answer.read().decode()


def names(*given: str) -> dict[str, object]:
    return {"inputs": [{"name": "name", "datatype": "BYTES", "shape": [len(given)], "data": [*given]}]}


def test_servables_beside_language_models(tmp_path: Path) -> None:
    """Text in, a language model of its own and one that is served, text out; what the service says of it all."""
    folder = write(tmp_path / "root", "story", STORY)
    shutil.copy(DEMO, folder / "1" / "story.psm")
    with LLM(DEMO) as llm:
        wanted = [
            one.text for one in llm.generate(["def add(", "def pop("], SamplingParams(max_tokens=8, temperature=0.0))
        ]
    args = [tmp_path / "root", DEMO, "--max-requests", "4", "--log", "warning"]
    with serving(*args, cwd=tmp_path) as (process, url, said):
        assert "story.function, version 1: name BYTES[] -> code BYTES[], length INT64[]" in said
        assert [one["id"] for one in ask(url, "/v1/models")["data"]] == ["demo"], "its own model is in no list"
        answer = ask(url, "/v2/models/story/infer", names("add", "pop"))
        found = {one["name"]: one["data"] for one in answer["outputs"]}
        assert found["code"] == ["def add(" + wanted[0], "def pop(" + wanted[1]]
        assert found["length"] == [len(one) for one in wanted]
        status, text = refused(url, "/v2/models/story/infer", names("add", "1"))
        assert status == 400
        assert "before, instance 1: a name is expected" in text
        (shown,) = ask(url, "/status")["servables"]
        (version,) = shown["versions"]
        assert (shown["name"], version["state"], version["is_ready"]) == ("story", "READY", True)
        assert version["methods"][0]["num_success"] == 1
        assert [one["runs"] for one in version["processes"]] == ["story 1: stages"]
        with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=600)) as link:
            link.request("GET", "/metrics")
            metrics = link.getresponse().read().decode()
        assert 'penstock:servable_requests_total{method="story.function",version="1",end="success"} 1\n' in metrics
        assert 'penstock:servable_ready{servable="story",version="1"} 1\n' in metrics
        everyone = psutil.Process(process.pid).children(recursive=True)
        assert len(everyone) == 3, "two workers and a stage process"
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 0
        until(lambda: not any(one.is_running() for one in everyone))
    assert "a line of add" in (tmp_path / "log").read_text()


def test_one_servable_without_models(tmp_path: Path) -> None:
    """Ready without a language model; the line to try works as it is; who kills the service leaves nothing."""
    text = """
        @servable.stage(outputs={"y": "FP32[2]"})
        def double(x):
            if x[0] == 1: time.sleep(1000)
            return x * 2

        @servable.method(inputs={"x": "FP32[2]"}, outputs={"y": "FP32[2]"})
        def twice(x):
            return double(x)
    """
    folder = write(tmp_path, "one", text)
    with serving(folder, cwd=tmp_path) as (process, url, said):
        assert ask(url, "/health/ready") == {"status": "ok"}
        line = said.partition("try: ")[2]
        done = subprocess.run(shlex.split(line), capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["outputs"][0]["data"] == [0, 0]
        (stage,) = psutil.Process(process.pid).children(recursive=True)
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 1]}]}
        with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=600)) as link:
            link.request("POST", "/v2/models/one/infer", json.dumps(body), {"Content-Type": "application/json"})
            until(lambda: ask(url, "/status")["servables"][0]["versions"][0]["num_open"] == 1)
            process.kill()
            process.wait()
        until(lambda: not stage.is_running() or stage.status() == psutil.STATUS_ZOMBIE)


def test_a_servable_that_cannot_be_loaded_ends_the_service(tmp_path: Path) -> None:
    write(tmp_path / "root", "one", "1 / 0")
    done = subprocess.run(
        ["penstock", "serve", str(tmp_path / "root"), "--port", "0"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "servable.py:4: ZeroDivisionError" in done.stderr


def test_folders_on_the_command_line(tmp_path: Path) -> None:
    """A folder of servables, one servable, a checkpoint; a name is for models."""
    folder = write(tmp_path / "root", "one", "")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    parse = make_parser(["serve"]).parse_args
    given = [str(tmp_path / "root"), str(folder), str(tmp_path / "checkpoint"), "a=m.psm"]
    settings = settings_of(parse(["serve", *given]))
    assert settings.servables == (tmp_path / "root", folder)
    assert [name for name, _ in settings.models] == ["", "a"]
    with pytest.raises(InvalidArgumentError, match="NAME="):
        settings_of(parse(["serve", f"a={folder}"]))
