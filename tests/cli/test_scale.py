"""plan, shard, convert, and export for ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import DEMO, FOLDER


@pytest.mark.long
def test_a_plan_is_cut_and_merged(penstock_inline, tmp_path: Path):
    strategy, cut = tmp_path / "tp2.json", tmp_path / "cut"
    done = penstock_inline("plan", FOLDER, "--tp", 2, "--out", strategy)
    assert done.returncode == 0, done.stderr
    for word in ("llama", "bf16", "56 parameters", "43 cut by rows", "ms/token", "exchanges"):
        assert word in done.stdout
    done = penstock_inline("shard", FOLDER, cut, "--strategy", strategy)
    assert done.returncode == 0, done.stderr
    planned = penstock_inline("shard", FOLDER, tmp_path / "planned", "--tp", 2)
    assert planned.stdout.removeprefix(str(tmp_path / "planned")).split()[:5] == [":", "2", "ranks,", "11.0", "MB"]
    assert (tmp_path / "planned" / "manifest.json").read_bytes() == (cut / "manifest.json").read_bytes()
    assert "2 ranks, 11.0 MB" in done.stdout
    checksum = done.stdout.split()[-1]
    again = penstock_inline("shard", cut, tmp_path / "again", "--strategy", strategy, "--from", strategy, "--verbose")
    assert again.stdout.count("\n") == 57, "a line for each parameter, and the last"
    merged = penstock_inline("shard", cut, tmp_path / "merged", "--merge")
    assert again.stdout.split()[-1] == merged.stdout.split()[-1] == checksum
    first, second = (path / "model.safetensors" for path in (Path(FOLDER), tmp_path / "merged"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.long
def test_a_plan_as_json(penstock_inline):
    found = json.loads(penstock_inline("plan", FOLDER, "--tp", 4, "--scheme", "w8a8", "--json").stdout)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
    assert all(rank["weight_bytes"] < 2_000_000 for rank in found["ranks"])
    assert [row["tp"] for row in found["predictions"]] == [1, 2, 4]
    assert all(row["token_ms"] > 0 for row in found["predictions"])
    quiet = json.loads(penstock_inline("plan", FOLDER, "--no-probe", "--json").stdout)
    assert (quiet["predictions"], quiet["scheme"], quiet["tp"]) == ([], "bf16", 1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plan", FOLDER, "--pp", "0"], "--pp: expected an integer from 1"),
        (["plan", FOLDER, "--pp", "40"], "--pp: expected at most"),
        (["plan", FOLDER, "--tp", "8", "--cp", "16"], "--tp: expected at most 64 ranks in all, got 128 (tp 8, cp 16)"),
        (["plan", FOLDER, "--tp", "0"], "--tp: expected an integer from 1"),
        (["plan", FOLDER, "--tp", "5"], "--tp: expected at most 4 ranks"),
        (["plan", FOLDER, "--scheme", "w2"], "--scheme: expected one of"),
        (["plan", DEMO, "--out", "OUT"], "expected a checkpoint folder or a GGUF file, got a bundle"),
        (["plan", DEMO, "--scheme", "f32"], "--scheme: expected none for the bundle"),
        (
            ["shard", FOLDER, "OUT"],
            "--strategy: expected one of --tp N (with --pp N, --cp N), --strategy FILE",
        ),
        (["shard", FOLDER, "OUT", "--merge"], "expected a sharded folder"),
        (["shard", FOLDER, "OUT", "--strategy", "/nowhere"], "--strategy: /nowhere: no such file"),
        (["shard", FOLDER, "OUT", "--merge", "--from", "x"], "--from: expected none with --merge"),
        (["shard", FOLDER, "OUT", "--merge", "--tp", "2"], "--strategy: expected one of"),
        (["shard", FOLDER, "OUT", "--tp", "0"], "--tp: expected an integer from 1"),
        (["shard", FOLDER, "OUT", "--merge", "--network", "n.py:N"], "--network: expected none with --merge"),
        (["convert", FOLDER, "OUT.ckpt"], "out: expected the name of a folder"),
        (["quantize", FOLDER, "OUT.psm", "--scheme", "w8a8"], "`penstock export FOLDER OUT.psm` writes such a file"),
        (["convert", FOLDER, "OUT", "--dtype", "f8"], "--dtype: expected one of f32, f16, bf16"),
        (["convert", "/nowhere", "OUT"], "/nowhere: no such file or folder"),
        (
            ["convert", FOLDER, "OUT", "--lora", "/nowhere"],
            "--lora: /nowhere: expected an adapter with adapter_config.json, got no",
        ),
        (["export", FOLDER, "OUT", "--tp", "0"], "--tp: expected an integer from 1"),
        (["export", "--config-path", "x.yaml", "--tp", "2"], "--tp: expected MODEL and OUT"),
        (["export", DEMO, "OUT", "--tp", "2", "--scheme", "f32"], "a bundle is exported already"),
    ],
)
def test_wrong_arguments_are_one_line(args: list[str], message: str, penstock_inline, tmp_path: Path):
    out = tmp_path / "out"
    done = penstock_inline(*(out if arg == "OUT" else arg for arg in args))
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not out.exists()


def test_conversion_and_ranks(penstock_command, tmp_path: Path):
    done = penstock_command("convert", DEMO, tmp_path / "folder")
    assert done.returncode == 0, done.stderr
    assert "tensors" in done.stdout
    assert "in 1 file" in done.stdout
    done = penstock_command("export", DEMO, tmp_path / "ranks", "--tp", 2)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "ranks").iterdir()) == ["rank_0.psm", "rank_1.psm"]
    whole = penstock_command("run", DEMO, "import", "--max-tokens", 8, "--temperature", 0)
    parts = penstock_command("run", tmp_path / "ranks", "import", "--max-tokens", 8, "--temperature", 0, "--tp", 2)
    assert (parts.stdout, parts.returncode) == (whole.stdout, 0)


@pytest.fixture
def stage_options(tmp_path: Path, certificate: tuple[Path, Path]) -> list[object]:
    """What --stage-port requires."""
    token = tmp_path / "token"
    token.write_text("0" * 64)
    token.chmod(0o600)
    return [
        "--pp",
        2,
        "--stage-token-file",
        token,
        "--stage-certificate",
        certificate[0],
        "--stage-key",
        certificate[1],
    ]


@pytest.mark.parametrize(
    "command", [["run", DEMO, "text"], ["bench", DEMO], ["serve", DEMO, "--port", "0", "--log-format=text"]]
)
def test_a_port_in_use_names_stage_port(penstock_inline, command, stage_options):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = penstock_inline(*command, "--stage-port", port, *stage_options)
    assert (done.returncode, done.stdout) == (1, "")
    text = f"penstock: --stage-port: failed to listen for stages at 127.0.0.1:{port}: Address already in use\n"
    assert done.stderr.endswith(text)


def test_an_unknown_stage_host_is_named(penstock_inline, stage_options):
    done = penstock_inline("run", DEMO, "text", "--stage-port", 0, "--stage-host", "no.invalid", *stage_options)
    assert "penstock: --stage-host: failed to listen for stages at no.invalid:0: " in done.stderr


NOISY = """
import os, sys
if "penstock.runtime.ranks.rank_process" in sys.orig_argv:
    getppid = os.getppid
    def noisy():
        os.write(1, b"a line of a library\\n")
        return getppid()
    os.getppid = noisy
"""


@pytest.mark.parametrize("command", [["run", DEMO, "def"], ["bench", DEMO, "-p", "8", "-n", "2", "--batch", "1"]])
def test_ranks_print_notes_and_text_on_stderr(command, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(NOISY)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", path.rstrip(os.pathsep))
    more = ["--max-tokens", "2"] if command[0] == "run" else []
    words = [*map(str, command), *more, "--tp", "2", "--threads", "64"]
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *words], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "library" not in done.stdout
    assert done.stderr.count("a line of a library\n") == 1
    assert done.stderr.count("penstock: The 2 ranks have 128 threads, but only ") == 1


def test_a_folder_of_another_layout_names_the_option(penstock_inline, tmp_path: Path):
    """Each of tp, pp and cp is named, whichever differs from that of the bundles."""
    cut = tmp_path / "cut"
    assert penstock_inline("export", FOLDER, cut, "--cp", 2).returncode == 0
    for words, text in (
        (["--cp", 4], f"--cp: expected 2, because {cut} is cut for cp 2, got 4\n"),
        (["--cp", 2, "--pp", 2], f"--pp: expected 1, because {cut} is cut for cp 2, got 2\n"),
        (["--tp", 3], f"--tp: expected 1, because {cut} is cut for cp 2, got 3\n"),
    ):
        done = penstock_inline("run", cut, "text", *words)
        assert (done.returncode, done.stderr) == (2, f"penstock: {text}")
    (cut / "rank_1.psm").unlink()
    assert "expected rank_1.psm, got no file" in penstock_inline("run", cut, "text", "--cp", 2).stderr


@pytest.mark.long
def test_bundles_and_gguf_files_are_planned(penstock_inline, tmp_path: Path):
    """Each as its folder is; a strategy is only for a folder."""
    file, bundle, cut = (tmp_path / name for name in ("model.gguf", "model.psm", "cut"))
    assert penstock_inline("convert", FOLDER, file, "--dtype", "bf16").returncode == 0
    assert penstock_inline("export", FOLDER, bundle).returncode == 0
    common = ["--tp", 2, "--no-probe", "--json"]
    ranks = [json.loads(penstock_inline("plan", source, *common).stdout)["ranks"] for source in (FOLDER, file, bundle)]
    assert ranks[0] == ranks[1] == ranks[2]
    assert f"{bundle}: llama, bf16, " in penstock_inline("plan", bundle, "--no-probe").stdout
    assert "got a GGUF file" in penstock_inline("plan", file, "--out", tmp_path / "strategy.json").stderr
    assert penstock_inline("export", FOLDER, cut, "--tp", 2).returncode == 0
    assert "expected a whole bundle, got that of one rank" in penstock_inline("plan", cut / "rank_1.psm").stderr


def test_a_plan_takes_a_link_and_says_what_repeated_heads_cost(penstock_inline):
    link = ["--link-us", "1000", "--link-gbps", "1"]
    found = json.loads(penstock_inline("plan", FOLDER, "--tp", 4, *link, "--json").stdout)
    two = next(row for row in found["predictions"] if (row["tp"], row["pp"]) == (2, 1))
    assert two["exchange_ms"] > two["num_exchanges"]
    assert found["repeated_kv_bytes"] == sum(rank["kv_bytes"] for rank in found["ranks"]) // 2
    done = penstock_inline("plan", FOLDER, "--tp", 4, "--no-probe")
    assert "Key-value heads are repeated on ranks, which costs " in done.stdout
    assert "repeated" not in penstock_inline("plan", FOLDER, "--tp", 2, "--no-probe").stdout
    done = penstock_inline("plan", FOLDER, "--no-probe", *link)
    assert done.stderr == "penstock: --link-us: expected none with --no-probe, which predicts no times\n"
