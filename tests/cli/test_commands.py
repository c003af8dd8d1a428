"""inspect, doctor and bench."""

from __future__ import annotations

import json
import signal
import threading

import pytest

from penstock.cli.main import main
from penstock.cli.progress import format_bytes
from tests.support.command import DEMO, FOLDER


def test_inspect_shows_a_bundle(penstock_command):
    done = penstock_command("inspect", DEMO, "--verify")
    assert done.returncode == 0, done.stderr
    for word in ("llama", "w8a8", "1,024", "checksum", "linear", "attention", "weights", "tokenizer.json", "total"):
        assert word in done.stdout
    found = json.loads(penstock_command("inspect", DEMO, "--json").stdout)
    assert found["network"] == "llama"
    assert found["context_len"] == 1024
    assert found["vocab_size"] == 4096
    assert found["parameters"] >= 5_475_584  # the network's constants count too
    assert found["page_windows"] == [0]
    assert 8 < found["bits_per_weight"] < 8.5  # w8a8: a float32 scale a row
    assert f"{found['bits_per_weight']:.2f} bits per weight" in done.stdout


def test_inspect_plans_memory_for_the_limits_given(penstock_command):
    def plan(*options: object) -> dict[str, int]:
        return json.loads(penstock_command("inspect", DEMO, "--json", *options).stdout)["plan"]

    one, four = plan(), plan("--max-requests", 4)
    assert four["kv_bytes"] == 4 * one["kv_bytes"]
    assert one["limits"]["num_pages"] == 32
    assert plan("--context-len", 512)["kv_bytes"] * 2 == one["kv_bytes"]
    assert one["limits"]["kv_layout"] == "bf16"  # the default of every scheme but f32
    assert plan("--kv-cache", "f32")["kv_bytes"] == 2 * one["kv_bytes"]
    assert plan("--kv-cache", "int8")["kv_bytes"] * 1.5 < one["kv_bytes"]
    assert plan("--kv-cache", "int4")["kv_bytes"] * 3 < one["kv_bytes"]
    assert plan("--max-tokens", 2048)["temporary_bytes"] > one["temporary_bytes"]
    parts = ("weight_bytes", "temporary_bytes", "scratch_bytes", "kv_bytes", "logits_bytes")
    assert sum(one[part] for part in parts) <= one["total_bytes"]


def test_inspect_shows_a_folder(penstock_command):
    done = penstock_command("inspect", FOLDER)
    assert done.returncode == 0, done.stderr
    for word in ("checkpoint", "llama", "bf16", "5,475,584", "56 tensors, ", "model.safetensors"):
        assert word in done.stdout
    assert json.loads(penstock_command("inspect", FOLDER, "--json").stdout)["num_tensors"] == 56


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([FOLDER, "--verify"], "verify"),
        (["/nowhere.psm"], "/nowhere.psm"),
        ([DEMO, "--max-requests", "0"], "--max-requests"),
        ([DEMO, "--max-tokens", "-1"], "--max-tokens"),
        ([DEMO, "--context-len", "4096"], "--context-len"),
    ],
)
def test_inspect_refuses_by_name(penstock_command, args, message):
    done = penstock_command("inspect", *args)
    assert (done.returncode, done.stdout) == (1 if message == "/nowhere.psm" else 2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_doctor_finds_what_is_there(penstock_command):
    done = penstock_command("doctor")
    assert done.returncode == 0
    for word in ("native core", "instructions", "threads", "cores", "memory", "huge pages", "torch", "cache"):
        assert word in done.stdout
    for extra in ("cluster", "mpi", "s3"):
        assert f"\n{extra} " in done.stdout
    assert "MISSING" not in done.stdout


def test_doctor_names_a_core_that_does_not_load(penstock_command, tmp_path):
    done = penstock_command("doctor", PENSTOCK_LIBRARY=str(tmp_path / "none.so"))
    assert done.returncode == 0
    assert "MISSING" in done.stdout


def test_bench_reports_every_figure_with_its_share(penstock_command):
    args = ("bench", DEMO, "--prompt-tokens", 32, "--new-tokens", 6, "--batch", "1,2")
    done = penstock_command(*args, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("load_s", "first_token_s", "prefill_tokens_per_s", "peak_rss_bytes", "weight_bytes_per_token"):
        assert found[name] > 0
    assert sorted(found["decode_tokens_per_s"]) == ["1", "2"]
    assert 0 < found["share_of_limit"]["prefill"] <= 1
    assert all(share > 0 for share in found["share_of_limit"]["decode"].values())
    assert found["limits"]["read_bytes_per_s"]["highest"] > 0
    assert set(found["limits"]["ops_per_s"]) == {"f32", "bf16", "int8"}
    assert found["populate_s"] == 0
    table = penstock_command(*args, "--weights", "huge").stdout
    assert "decode, batch 2" in table
    assert "copying weights" in table


def test_bench_online_reports_latencies_and_draws_them(penstock_command, tmp_path):
    picture = tmp_path / "latency.svg"
    args = ("--online", "--rate", "50%,100000", "--requests", 4, "--prompt-tokens", 20, "--new-tokens", 4)
    done = penstock_command("bench", DEMO, *args, "--svg", picture)
    assert done.returncode == 0, done.stderr
    assert "at once" in done.stdout
    assert "100000.00" in done.stdout
    assert "above the capacity of " in done.stdout
    assert picture.read_text().startswith("<svg")
    off = ("--online", "--rate", "none", *args[3:], "--no-prefix-cache", "--json")
    assert "capacity" not in penstock_command("bench", DEMO, *off[:-1]).stdout
    found = json.loads(penstock_command("bench", DEMO, *off).stdout)
    assert [run["rate"] for run in found["runs"]] == [0]
    assert set(found["runs"][0]["first_token_s"]) == {"50", "90", "99"}


def test_an_unwritable_chart_is_refused_before_measuring(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("penstock.bench.online.bench_online", lambda what, _progress: pytest.fail(f"measured {what}"))
    assert main(["bench", str(DEMO), "--online", "--svg", str(tmp_path / "nowhere" / "x.svg")]) == 1
    assert "x.svg: No such file" in capsys.readouterr().err
    monkeypatch.setattr("penstock.bench.online.bench_online", lambda _what, _progress: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["bench", str(DEMO), "--online", "--svg", str(tmp_path / "x.svg")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "3"], "--rate requires --online"),
        (["--no-prefix-cache"], "--no-prefix-cache requires --online"),
        (["--online", "--batch", "1"], "--batch cannot be combined with --online"),
        (["--online", "--requests", "0"], "--requests: expected an integer from 1 to 1048576, got 0"),
        (["--online", "--rate", "fast"], "--rate: expected none, or numbers or percentages"),
        (["--batch", "1,x"], "batch"),
        (["--batch", "0"], "batch"),
        (["--batch", "1,1"], "batch"),
        (["--prompt-tokens", "0"], "--prompt-tokens"),
        (["--new-tokens", "5000"], "context"),
    ],
)
def test_bench_refuses_by_name(penstock_command, options, message):
    done = penstock_command("bench", DEMO, *options)
    assert done.returncode == 2
    assert message in done.stderr


def test_export_writes_names_that_run_takes(penstock_command, tmp_path):
    done = penstock_command("export", FOLDER, tmp_path / "model.bin")
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "model.bin: the name of a bundle must end in .psm" in done.stderr


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (11_000_000, "11.0 MB"),
        (99_960_000, "100 MB"),
        (999_600_000, "1.00 GB"),
        (50_000_000_000, "50.0 GB"),
        (5_000_000_000_000_000, "5000 TB"),
    ],
)
def test_sizes_have_three_digits(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_calling_main_keeps_the_callers_ctrl_c(capsys):
    from penstock.cli.main import main

    before = set(threading.enumerate())  # other tests' threads may end meanwhile
    assert main(["inspect", str(DEMO)]) == 0
    assert "llama" in capsys.readouterr().out
    assert set(threading.enumerate()) <= before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["serve", DEMO, "--port", "0", "--max-requests", "100000000"],
            "--max-requests: expected an integer from 1 to",
        ),
        (
            ["batch", DEMO, "{}", "{}.out", "--max-requests", "100000000"],
            "--max-requests: expected an integer from 1",
        ),
        (["bench", DEMO, "--batch", "100000"], "--batch: expected an integer from 1 to 65536, got 100000"),
        (["profile", DEMO, "--batch", "100000"], "--batch: expected an integer from 1 to 65536, got 100000"),
        (["bench", DEMO, "--online", "--max-requests", "100000000"], "--max-requests: expected an integer from 1 to"),
        (["run", DEMO, "x", "--threads", "5000"], "--threads: expected an integer"),
        (["run", DEMO, "x", "--scheme", "w9"], "--scheme: expected one of"),
        (["run", DEMO, "x", "--network", "net.py:Net"], "network: expected none for the bundle"),
        (["run", DEMO, "x", "--ops", "gone.so"], "--ops: gone.so"),
        (["run", DEMO, "x", "--mode", "eager"], "--mode eager"),
        (["run", DEMO, "x", "--chat"], "--chat: "),
        (["run", FOLDER, "x", "--network", "gone.py:Net"], "--network: gone.py"),
        (["infer", "x", "--model", DEMO, "--backend", "eager"], "--backend eager"),
        (["infer", "x", "--model", DEMO, "--tokenizer", ""], "--tokenizer"),
        (["bench", DEMO, "--batch="], "--batch"),
        (["serve", DEMO, "--port", "0", "--scheme", "w9"], "--scheme: expected one of"),
    ],
)
def test_a_wrong_option_is_named_in_one_line(penstock_inline, tmp_path, args, message):
    requests = tmp_path / "in.jsonl"
    requests.write_text('{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}')
    done = penstock_inline(*(str(arg).replace("{}", str(requests)) for arg in args))
    assert (done.returncode, done.stdout) == (1 if "gone" in message else 2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", f"{FOLDER}/config.json", "x"], f"not a bundle. Pass a checkpoint folder, such as {FOLDER}, a GGUF"),
        (["inspect", __file__], "not a bundle. Pass a checkpoint folder, a GGUF file or a .psm bundle."),
        (
            ["serve", DEMO, "--log-format=text", "--api-key-file", "gone"],
            "penstock: --api-key-file: gone: No such file",
        ),
        (["worker", DEMO, "--primary", "h:1", "--token-file", "gone"], "penstock: --token-file: gone: No such file"),
    ],
)
def test_a_wrong_file_is_named_with_what_to_pass(penstock_inline, args, message):
    done = penstock_inline(*args)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_small_file_is_not_a_bundle(penstock_command, tmp_path):
    (tmp_path / "text.psm").write_text("hello\n")
    done = penstock_command("run", tmp_path / "text.psm", "x")
    assert (done.returncode, done.stdout) == (1, "")
    assert "text.psm: file: this is not a bundle" in done.stderr
