"""``penstock list``, ``show`` and ``rm``, and the service under the name of a downloaded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import make_parser
from penstock.cli.service.serve import settings_of
from penstock.hub.aliases import ALIASES
from penstock.hub.names import parse_name
from tests.support.gguf_files import llama_file
from tests.support.hub_server import demo_files

NAME = "demo/tiny"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.long
def test_list_shows_what_is_here_and_what_is_wrong(hub, hub_command, tmp_path):
    empty = hub_command("list", **OFFLINE)
    assert empty.stdout.startswith("0 models")
    assert "penstock pull smollm2-135m" in empty.stdout
    hub.add(NAME, demo_files())
    hub.add("demo/gguf", {"q4.gguf": b"GGUF"})
    hub.add("demo/whole", {"q8/m-00001-of-00001.gguf": llama_file()})
    hub.add("demo/other", demo_files(model_type="gpt9"))
    hub.add("demo/half", demo_files())
    files = (("demo/gguf", "--gguf", "q4.gguf"), ("demo/whole", "--gguf", "q8/m-00001-of-00001.gguf"))
    for args in ((NAME,), *files, ("demo/other", "--force"), ("demo/half",)):
        assert hub_command("pull", *args).returncode == 0
    (next((tmp_path / "hf").rglob("models--demo--half/snapshots/*")) / "model.safetensors").unlink()
    lines = hub_command("list", **OFFLINE).stdout.splitlines()
    assert lines[0].split() == ["NAME", "COMMIT", "FAMILY", "SIZE", "LAST", "USED"]
    problems = {line.split()[0]: line for line in lines[1:-1]}
    assert problems["demo/gguf"].endswith("cannot run: a damaged GGUF file")
    assert "llama" in problems["demo/whole"]
    assert problems["demo/whole"].endswith("GGUF: penstock show demo/whole has the paths")
    shown = hub_command("show", "demo/whole", **OFFLINE).stdout
    assert "family      llama" in shown
    assert shown.strip().endswith("q8/m-00001-of-00001.gguf")
    assert problems["demo/other"].endswith("cannot run: no network for gpt9")
    assert not problems[NAME].endswith("run")
    objects = json.loads(hub_command("list", "--json", **OFFLINE).stdout)
    found = next(one for one in objects if one["name"] == NAME)
    assert (found["revision"], found["family"], found["problem"]) == ("main", "llama", "")
    half = next(one for one in objects if one["name"] == "demo/half")
    assert half["problem"]


def test_show_gives_files_and_memory(hub, hub_command):
    commit = hub.add(NAME, demo_files())
    path = hub_command("show", "demo/demo.psm")
    assert path.returncode == 2
    assert "got a path; `penstock inspect demo/demo.psm` shows what it contains" in path.stderr
    missing = hub_command("show", NAME)
    assert missing.returncode == 1
    assert f"penstock pull {NAME} --dry-run" in missing.stderr
    hub_command("pull", NAME)
    text = hub_command("show", NAME, **OFFLINE).stdout
    for part in ("family      llama, context of 1,024 tokens", commit, "model.safetensors", "in bf16", "in w4a8"):
        assert part in text
    (entry,) = json.loads(hub_command("show", NAME, "--json", **OFFLINE).stdout)
    assert entry["files"]["model.safetensors"] == len(demo_files()["model.safetensors"])
    assert entry["memory_bytes"]["w4a8"] < entry["memory_bytes"]["bf16"]


@pytest.mark.long
def test_rm_spares_what_another_revision_uses(hub, hub_command):
    old = hub.add(NAME, demo_files(), "v1")
    hub.add(NAME, demo_files(rms_norm_eps=1e-6))
    for name in (f"{NAME}@v1", NAME):
        hub_command("pull", name)
    refused = hub_command("rm", f"{NAME}@v1")
    assert refused.returncode == 2
    assert "add --yes" in refused.stderr
    removed = hub_command("rm", f"{NAME}@v1", "--yes", **OFFLINE)
    assert removed.stdout.startswith(f"removed {NAME}@v1, ")
    assert " B" in removed.stdout  # only its config.json
    (entry,) = json.loads(hub_command("show", NAME, "--json").stdout)
    assert entry["commit"] != old
    assert all(path.exists() for path in Path(entry["path"]).iterdir())
    assert hub_command("run", NAME, "x", "--max-tokens", 1, **OFFLINE).returncode == 0
    whole = hub_command("rm", NAME, "--yes", **OFFLINE)
    assert "11.2 MB, and 1 cached bundle" in whole.stdout
    assert hub_command("list").stdout.startswith("0 models")
    assert hub_command("rm", NAME, "--yes").returncode == 1


def test_rm_takes_the_rest_of_a_pull_that_stopped(hub, hub_command, tmp_path):
    folder = tmp_path / "hf" / "hub" / "models--demo--tiny" / "blobs"
    folder.mkdir(parents=True)
    (folder / f"{'a' * 64}.incomplete").write_bytes(b"x" * 1000)
    assert hub_command("rm", NAME, "--yes").stdout == f"removed {NAME}, 1.00 kB\n"
    assert not folder.exists()


def test_the_service_has_the_name_of_the_repository(hub, hub_command, tmp_path, monkeypatch):
    hub.add(NAME, demo_files())
    path = hub_command("pull", NAME).stdout.strip()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    for source, name in ((NAME, "tiny"), (f"chat={NAME}", "chat")):
        settings = settings_of(make_parser(["serve"]).parse_args(["serve", source]))
        assert settings.models == ((name, path),)


def test_the_table_of_short_names_is_sound(hub_command):
    text = hub_command("list", "--available", **OFFLINE).stdout
    for name, row in ALIASES.items():
        assert parse_name(name).repository == row.repository
        line = next(line for line in text.splitlines() if line.startswith(name))
        assert row.repository in line
    names = [one["name"] for one in json.loads(hub_command("list", "--available", "--json").stdout)]
    assert names == list(ALIASES)


@pytest.mark.parametrize("command", ["run", "inspect", "quantize"])
def test_a_name_that_is_no_path_says_what_to_do(hub_command, command):
    rest = {"run": ("x",), "inspect": (), "quantize": ("out", "--scheme", "w8a8")}[command]
    done = hub_command(command, NAME, *rest)
    assert done.returncode != 0
    assert f"`penstock pull {NAME}`" in done.stderr
    done = hub_command(command, "nothing", *rest)
    assert done.returncode == 2
    assert "nothing: no such file or folder. Expected the path of" in done.stderr
