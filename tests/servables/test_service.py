"""``penstock serve FOLDER``: servables beside language models, over HTTP and gRPC, stopped with the service."""

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
from penstock.cli.service.serve import settings_of
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError, InvalidFileError
from penstock.llm.llm import LLM
from penstock.servables.lifecycle.open_version import VersionSource
from tests.support.admin_socket import call
from tests.support.command import DEMO, FOLDER
from tests.support.errors import raises
from tests.support.http_service import until
from tests.support.servable_folders import write
from tests.support.serve_command import ask, serving

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


FOLDERS = """
    whole = servable.language_model(".", max_tokens=8, temperature=0.0)
    small = servable.language_model("small", scheme="w8a8", max_tokens=8, temperature=0.0)

    @servable.method(inputs={"prompt": "TEXT[]"}, outputs={"one": "TEXT[]", "two": "TEXT[]"})
    def both(prompt):
        return whole(prompt), small(prompt)
"""


def refused(url: str, path: str, body: dict[str, object]) -> tuple[int, str]:
    with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=600)) as link:
        link.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = link.getresponse()
        return answer.status, answer.read().decode()


def names(*given: str) -> dict[str, object]:
    return {"inputs": [{"name": "name", "datatype": "BYTES", "shape": [len(given)], "data": [*given]}]}


@pytest.mark.long
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
        assert len(everyone) == 3, "two workers and a servable worker"
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 0
        until(lambda: not any(one.is_running() for one in everyone))
    assert "a line of add" in (tmp_path / "log").read_text()


@pytest.mark.long
def test_checkpoint_folders_are_language_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version's folder is one, and holds another, which is quantized by the way."""
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    folder = write(tmp_path / "root", "story", FOLDERS)
    for place in (folder / "1", folder / "1" / "small"):
        shutil.copytree(FOLDER, place, dirs_exist_ok=True)
    wanted = []
    for scheme in (None, "w8a8"):
        with LLM(FOLDER, scheme=scheme) as llm:
            wanted.append(llm.generate(["def add("], SamplingParams(max_tokens=8, temperature=0.0))[0].text)
    with serving(tmp_path / "root", "--max-requests", "4", "--log", "warning", cwd=tmp_path) as (_, url, said):
        assert "story.both, version 1: prompt BYTES[] -> one BYTES[], two BYTES[]" in said
        body = {"inputs": [{"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["def add("]}]}
        assert [one["data"] for one in ask(url, "/v2/models/story/infer", body)["outputs"]] == [[one] for one in wanted]


def one_language_model(folder: Path, config: str, *names: str) -> None:
    (folder / "1" / "weights").mkdir()
    (folder / "1" / "weights" / "config.json").write_text(config)
    for name in names:
        (folder / "1" / "weights" / name).write_bytes((2).to_bytes(8, "little") + b"{}")  # no tensors


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "names", "told"),
    [
        ('{"model_type": "mamba"}', ["model.safetensors"], "1/weights: model_type: expected one of"),
        (None, ["pytorch_model.bin"], "pickled PyTorch weights are not supported"),
    ],
)
def test_unsupported_checkpoint_is_refused_by_name(
    tmp_path: Path, config: str | None, names: list[str], told: str
) -> None:
    folder = write(tmp_path / "root", "story", FOLDERS.replace('"."', '"weights"'))
    one_language_model(folder, config or (FOLDER / "config.json").read_text(), *names)
    command = ["penstock", "serve", str(tmp_path / "root"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_language_model_files_must_be_inside(tmp_path: Path) -> None:
    folder = write(tmp_path / "root", "story", "")
    source = VersionSource("story", folder / "servable.py", b"", "1", folder / "1", tmp_path / "root")
    one_language_model(folder, "{}", "model.safetensors")
    assert source.check_language_model("weights") == folder / "1" / "weights"
    with raises(InvalidFileError, param="path", match=r"no config\.json"):
        source.check_language_model(".")
    (tmp_path / "tokenizer.json").write_text("{}")
    (folder / "1" / "weights" / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    wrong = {
        "weights": "a link leads out",
        ".": "a link leads out",
        "weights/config.json": "neither a bundle",
        "none": "No such file",
        "none.psm": "No such file",
    }
    for name, message in wrong.items():
        with pytest.raises(InvalidFileError, match=message):
            source.check_language_model(name)


def test_language_models_of_every_form_are_checked(tmp_path: Path) -> None:
    folder = write(tmp_path / "root", "story", "")
    version = folder / "1"
    source = VersionSource("story", folder / "servable.py", b"", "1", version, tmp_path / "root")
    (version / "weights" / "0_Transformer").mkdir(parents=True)
    (version / "weights" / "modules.json").write_text('[{"path": "0_Transformer"}]')
    config = version / "weights" / "0_Transformer" / "config.json"
    config.write_text("{}")
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf"):
        (version / name).write_bytes(b"GGUF")
    for name in ("weights", "m-00001-of-00002.gguf"):
        assert source.check_language_model(name) == version / name
    for path in (config, version / "m-00002-of-00002.gguf"):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    for name in ("weights", "m-00001-of-00002.gguf"):
        with raises(InvalidFileError, param="path", match="leads out of"):
            source.check_language_model(name)


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
    with serving(folder, "--admin-socket", tmp_path / "admin", cwd=tmp_path) as (process, url, said):
        for name in ("one", "one.more"):
            status, answer = call(tmp_path / "admin", "POST", "/admin/models/load", {"path": str(DEMO), "name": name})
            assert (status, answer["error"]["param"]) == (400, "name")
            assert f"'{name}' is taken by the servable one" in answer["error"]["message"]
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


def test_failed_first_load_stops_the_service(tmp_path: Path) -> None:
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
    (tmp_path / "empty" / "nothing").mkdir(parents=True)
    told = r"empty: .*config\.json.* \(NAME/servable\.py\)"
    for name in ("", "a="):
        with raises(InvalidArgumentError, param="model", match=told):
            settings_of(parse(["serve", f"{name}{tmp_path / 'empty'}"]))
    (tmp_path / "empty" / "m.gguf").touch()
    assert settings_of(parse(["serve", str(tmp_path / "empty")])).servables == (), "its own words tell of GGUF"
    with raises(InvalidArgumentError, param="model"):
        settings_of(parse(["serve", f"a={folder}"]))
