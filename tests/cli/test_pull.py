"""``penstock pull`` and ``run ORG/NAME``, against a hub on this machine."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.command import environment, start
from tests.support.hub_server import TOKEN, demo_files
from tests.support.marks import mostly_long
from tests.support.terminal import Terminal
from tests.support.waiting import until

NAME = "demo/tiny"
TAKEN = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
GREEDY = ("def add(a, b):", "--max-tokens", 8, "--temperature", 0)


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The only line of an error."""
    (line,) = done.stderr.strip().splitlines()
    assert done.stdout == ""
    return line.removeprefix("penstock: ")


def blobs(tmp_path: Path, name: str = NAME) -> list[Path]:
    return sorted((tmp_path / "hf" / "hub" / f"models--{name.replace('/', '--')}" / "blobs").glob("*"))


def test_pull_takes_weights_and_texts_but_no_code(hub, hub_command):
    commit = hub.add(NAME, demo_files())
    done = hub_command("pull", NAME)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.name == commit
    assert {path.name for path in folder.iterdir()} == TAKEN
    assert all(path.read_bytes() == demo_files()[path.name] for path in folder.iterdir())
    assert not hub.gets("pytorch_model.bin")
    assert not hub.gets("modeling_demo.py")
    assert "11.2 MB to download, 5 files" in done.stderr
    assert "memory" in done.stderr
    again = hub_command("pull", NAME)
    assert "up to date" in again.stderr
    assert again.stdout == done.stdout
    assert len(hub.gets("model.safetensors")) == 2  # the hub's redirect, and the CDN


def test_pull_takes_a_branch_and_a_commit(hub, hub_command):
    first = hub.add(NAME, demo_files(), "v1")
    second = hub.add(NAME, demo_files(rms_norm_eps=1e-6))
    assert hub_command("pull", f"{NAME}@v1").stdout.strip().endswith(first)
    assert hub_command("pull", NAME).stdout.strip().endswith(second)
    assert hub_command("pull", f"{NAME}@{first}").stdout.strip().endswith(first)
    assert len(hub.gets("model.safetensors")) == 2  # both commits have the same weights


def test_shards_are_those_of_the_index(hub, hub_command):
    files = demo_files()
    weights = files.pop("model.safetensors")
    files |= {"model-00001-of-00001.safetensors": weights, "consolidated.safetensors": weights}
    files["model.safetensors.index.json"] = b'{"weight_map": {"a": "model-00001-of-00001.safetensors"}}'
    hub.add(NAME, files)
    folder = Path(hub_command("pull", NAME).stdout.strip())
    assert [path.name for path in folder.glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]
    files["model.safetensors.index.json"] = b'{"weight_map": {"a": "../../model.safetensors"}}'
    hub.add(NAME, files)
    assert "expected names of .safetensors files" in one_line(hub_command("pull", NAME))


ENCODER = {"model_type": "bert", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96}
ENCODER |= {"num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("architecture", "command"),
    [
        ("BertModel", "penstock embed demo/tiny FILE"),
        ("BertForSequenceClassification", "penstock rerank demo/tiny FILE"),
    ],
)
def test_a_pulled_encoder_is_not_a_language_model(hub, hub_command, architecture, command):
    hub.add(NAME, demo_files() | {"config.json": json.dumps(ENCODER | {"architectures": [architecture]}).encode()})
    done = hub_command("pull", NAME)
    assert f"To use it: {command}" in done.stderr


def test_a_connection_that_breaks_off_is_resumed(hub, hub_command):
    hub.add(NAME, demo_files())
    hub.breaks["model.safetensors"] = [3_000_000, 2_000_000]
    done = hub_command("pull", NAME)
    assert done.returncode == 0, done.stderr
    ranges = [request.headers.get("Range") for request in hub.gets("model.safetensors") if "cdn" in request.path]
    assert ranges[0] is None
    assert len(ranges) == 3
    assert all(value is not None for value in ranges[1:])


@pytest.mark.parametrize("ignores_ranges", mostly_long([False, True], False))
def test_a_pull_that_was_killed_is_resumed(hub, hub_command, tmp_path, ignores_ranges):
    hub.add(NAME, demo_files())
    hub_command("pull", NAME, "--dry-run")
    digest = hub.repositories[NAME].commits[hub.repositories[NAME].refs["main"]]["model.safetensors"].digest
    folder = tmp_path / "hf" / "hub" / "models--demo--tiny" / "blobs"
    folder.mkdir(parents=True)
    (folder / f"{digest}.incomplete").write_bytes(demo_files()["model.safetensors"][:5_000_000])
    hub.ignores_ranges = ignores_ranges
    done = hub_command("pull", NAME)
    assert done.returncode == 0, done.stderr
    assert "6.22 MB of 11.2 MB to download" in done.stderr
    assert hub.gets("model.safetensors")[-1].headers["Range"] == "bytes=5000000-"
    assert (Path(done.stdout.strip()) / "model.safetensors").read_bytes() == demo_files()["model.safetensors"]


def is_partly_there(folder: Path) -> bool:
    try:
        return any(path.stat().st_size > 900_000 for path in blobs(folder))
    except FileNotFoundError:  # a file got its final name meanwhile
        return False


@pytest.mark.long
def test_an_interrupted_pull_says_how_to_go_on(hub, tmp_path):
    hub.add(NAME, demo_files())
    hub.stall_after = 1_000_000
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    with start("pull", NAME, env=environment(**settings)) as process:
        try:
            until(lambda: is_partly_there(tmp_path), process=process)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate()
        finally:
            process.kill()
    assert process.returncode == 130
    assert b"The same command goes on from there." in errors
    assert b"Traceback" not in errors
    hub.stall_after = 0
    assert any(path.name.endswith(".incomplete") for path in blobs(tmp_path))


@pytest.mark.long
def test_a_hub_that_is_away_leaves_what_arrived(hub, hub_command, tmp_path):
    hub.add(NAME, demo_files())
    hub.breaks["model.safetensors"] = [1_000_000]
    hub.fails_after_break = True
    done = hub_command("pull", NAME)
    assert done.returncode == 1
    assert "The download stopped: " in done.stderr
    assert "answered with an error (503)" in done.stderr
    hub.status = 0
    again = hub_command("pull", NAME)
    assert again.returncode == 0, again.stderr
    assert f" of {11.2} MB to download" in again.stderr


def test_wrong_content_is_refused_and_removed(hub, hub_command, tmp_path):
    hub.add(NAME, demo_files())
    hub.short.add("tokenizer.json")
    done = hub_command("pull", NAME)
    assert done.returncode == 1
    assert "tokenizer.json: expected the 262503 bytes of the hub's listing, got 262496" in done.stderr
    hub.short.clear()
    hub.corrupt.add("model.safetensors")
    done = hub_command("pull", NAME)
    assert done.returncode == 1
    assert "model.safetensors: the content does not match the digest" in done.stderr
    hub.corrupt.clear()
    assert hub_command("pull", NAME).returncode == 0


def test_gated_models_ask_for_a_token_which_the_cdn_never_sees(hub, hub_command):
    hub.add(NAME, demo_files(), gated=True)
    refused = hub_command("pull", NAME)
    assert refused.returncode == 1
    assert f"Accept the conditions at {hub.url}/{NAME}" in one_line(refused)
    assert hub_command("pull", NAME, HF_TOKEN=TOKEN).returncode == 0
    on_cdn = [request for request in hub.requests if request.path.startswith("/cdn/")]
    assert on_cdn
    assert not any("authorization" in map(str.lower, request.headers) for request in on_cdn)


@pytest.mark.parametrize(
    ("args", "message", "status"),
    [
        (("demo/gone",), "has no such repository, or it is private", 1),
        (("demo/tiny@v9",), "has no revision v9", 1),
        (("demo/pickled",), "run `penstock convert FOLDER OUT`", 1),
        (("demo/other",), "Penstock has no network for model_type gpt9", 1),
        (("demo/quantized",), "quant_method 'hqq' is not supported", 1),
        (("demo/gguf",), "`penstock pull demo/gguf --gguf q4.gguf` downloads one", 1),
        (("demo/gguf", "--gguf", "q8.gguf"), "--gguf: expected one of q4.gguf, got 'q8.gguf'", 2),
        (("tiny",), "expected ORG/NAME of a repository", 2),
        (("demo/../tiny",), "expected ORG/NAME of a repository", 2),
        (("demo/tiny@../x",), "expected a branch, a tag or a commit after @", 2),
        (("llama3.2",), "Did you mean llama3.2-", 2),
    ],
)
def test_what_cannot_be_pulled_is_named(hub, hub_command, args, message, status):
    hub.add(NAME, demo_files())
    hub.add("demo/pickled", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    hub.add("demo/other", demo_files(model_type="gpt9"))
    hub.add("demo/quantized", demo_files(quantization_config={"quant_method": "hqq"}))
    hub.add("demo/gguf", {"q4.gguf": b"GGUF"})
    done = hub_command("pull", *args)
    assert message in done.stderr
    assert done.returncode == status
    assert not hub.gets("model.safetensors")


@pytest.mark.long
def test_the_disk_and_the_memory_are_checked_before_a_byte(hub, hub_command):
    hub.add(NAME, demo_files())
    hub.lengthen["model.safetensors"] = 10**15
    for args in (("pull", NAME), ("run", NAME, "x", "--yes")):
        done = hub_command(*args)
        assert done.returncode == 1
        assert "need 1,000,000.0 GB on the disk of" in done.stderr.replace("needs", "need")
    hub.lengthen.clear()
    hub.add(NAME, demo_files(num_hidden_layers=1000, num_key_value_heads=1024, head_dim=256))
    for args in (("pull", NAME), ("run", NAME, "x", "--yes")):
        done = hub_command(*args)
        assert done.returncode == 1
        assert "of memory" in done.stderr
    assert not hub.gets("model.safetensors")
    assert hub_command("pull", NAME, "--force").returncode == 0


def test_a_gguf_file_comes_by_itself(hub, hub_command):
    hub.add("demo/gguf", {"q4.gguf": b"GGUF" * 100, "q8.gguf": b"GGUF" * 200})
    done = hub_command("pull", "demo/gguf", "--gguf", "q4.gguf")
    assert Path(done.stdout.strip()).read_bytes() == b"GGUF" * 100
    assert f"penstock run {done.stdout.strip()}" in done.stderr
    assert not hub.gets("q8.gguf")


def test_every_file_of_a_split_gguf_model_comes(hub, hub_command):
    hub.add("demo/gguf", {"q8/m-00001-of-00002.gguf": b"GGUF1", "q8/m-00002-of-00002.gguf": b"GGUF2", "q4.gguf": b"x"})
    done = hub_command("pull", "demo/gguf", "--gguf", "q8/m-00002-of-00002.gguf")
    first = Path(done.stdout.strip())
    assert first.name == "m-00001-of-00002.gguf"
    assert sorted(path.read_bytes() for path in first.parent.iterdir()) == [b"GGUF1", b"GGUF2"]


@pytest.mark.long
def test_run_downloads_with_consent_and_then_needs_no_hub(hub, hub_command, tmp_path):
    hub.add(NAME, demo_files())
    refused = hub_command("run", NAME, *GREEDY)
    assert refused.returncode == 2
    assert f"run `penstock pull {NAME}` or add --yes" in one_line(refused)
    assert not hub.requests
    done = hub_command("run", NAME, *GREEDY, "--yes")
    assert done.returncode == 0, done.stderr
    num_requests = len(hub.requests)
    for settings in ({}, {"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        again = hub_command("run", NAME, *GREEDY, **settings)
        assert (again.returncode, again.stdout) == (0, done.stdout)
    assert len(hub.requests) == num_requests
    exported = hub_command("export", NAME, tmp_path / "tiny.psm", "--scheme", "w8a8")
    assert exported.returncode == 0, exported.stderr
    assert "llama, w8a8" in exported.stdout


def test_a_model_that_is_not_there_says_so_offline(hub_command):
    done = hub_command("run", NAME, "x", "--yes", HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert "HF_HUB_OFFLINE is set" in one_line(done)
    done = hub_command("pull", NAME, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in one_line(done)
    done = hub_command("pull", NAME, HF_ENDPOINT="http://127.0.0.1:9")
    assert "no connection to http://127.0.0.1:9" in one_line(done)


def test_an_existing_path_is_never_a_name(hub, hub_command, tmp_path, monkeypatch):
    hub.add(NAME, demo_files())
    (tmp_path / "demo" / "tiny").mkdir(parents=True)
    done = hub_command("inspect", tmp_path / "demo" / "tiny")
    assert "expected a checkpoint folder with config.json" in done.stderr
    assert not hub.requests


ANSWERS = [("y\n", 0), ("\n", 0), ("n\n", 1), ("\x04", 1)]


@pytest.mark.long
@pytest.mark.parametrize(("answer", "status"), mostly_long(ANSWERS, ("y\n", 0), ("n\n", 1)))
def test_a_terminal_is_asked(hub, tmp_path, answer, status):
    hub.add(NAME, demo_files())
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "PENSTOCK_CACHE_DIR": str(tmp_path / "cache")}
    with Terminal("run", NAME, *GREEDY, **settings) as terminal:
        terminal.until("Download it? [Y/n]")
        terminal.type(answer)
        shown = terminal.rest(200)
        assert terminal.process.wait(timeout=300) == status, shown
    assert bool(hub.gets("model.safetensors")) == (status == 0)
