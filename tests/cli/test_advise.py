"""``penstock advise``: a table of schemes from real steps, a recommendation, and refusals by name."""

from __future__ import annotations

import pytest

from penstock.bench import advise as module
from tests.support.command import DEMO, Run


def test_advice_names_a_scheme_and_the_commands(penstock_command: Run) -> None:
    sizes = ["--prompt-tokens", "16", "--new-tokens", "8", "--concurrency", "2"]
    done = penstock_command("advise", DEMO, "--schemes", "w8a8,w4a8", "--memory", "4", "--latency", "60000", *sizes)
    assert done.returncode == 0, done.stderr
    assert "expected for 2 requests at once, each with a prompt of 16 tokens and an answer of 8:" in done.stdout
    assert "Recommended: w8a8." in done.stdout
    for way in ("Python ", "bundle ", "service ", "device "):
        assert f"\n{way}" in done.stdout
    assert f"penstock serve {DEMO} --max-requests 2 --context-len 24" in done.stdout
    assert "measuring w4a8" in done.stderr


def test_no_scheme_is_recommended_for_what_none_meets(penstock_command: Run) -> None:
    sizes = ["--prompt-tokens", "16", "--new-tokens", "8"]
    done = penstock_command("advise", DEMO, "--schemes", "w4a8", "--throughput", "1e9", "--memory", "0.01", *sizes)
    assert done.returncode == 0, done.stderr
    assert "misses --memory, --throughput" in done.stdout
    assert "No scheme meets every wish on this machine" in done.stdout
    assert "CHECKPOINT is the folder that the model was made from." in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--latency", "0"], "--latency: expected a number above 0"),
        (["--first-token", "-1"], "--first-token: expected a number above 0"),
        (["--throughput", "nan"], "--throughput: expected a number above 0"),
        (["--memory", "inf"], "--memory: expected a number above 0"),
        (["--concurrency", "0"], "--concurrency: expected"),
        (["--prompt-tokens", "2000"], "--prompt-tokens: expected a prompt and an answer of together at most 1024"),
        (["--schemes", "w8a8,"], "--schemes: expected some of f32"),
        (["--schemes", "w8a8,w8a8"], "--schemes: expected a list of different schemes"),
    ],
)
def test_errors_name_the_option(options, message, capsys, monkeypatch) -> None:
    from penstock.cli.main import main

    monkeypatch.setattr(module, "machine_of", lambda context: pytest.fail("measured before the options were checked"))
    assert main(["advise", str(DEMO), *options]) == 2
    assert message in capsys.readouterr().err
