"""``penstock infer``: the document's options, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.engine.params import SamplingParams
from penstock.llm.llm import LLM
from tests.support.command import DEMO, Run

PROMPT = "I love Beijing,because"


@pytest.fixture(scope="module")
def expected() -> str:
    with LLM(DEMO) as llm:
        return llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0)).text + "\n"


def test_the_options_of_the_document(expected: str, penstock_command: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.ini"
    config.write_text("[model]\nmax_tokens = 64\n")
    words = f"infer --device-id 0 --model-name bloom --prefill-model-path {DEMO} --increment-model-path {DEMO}"
    words += f" --config-path {config} --is-sample-acceleration True --infer-seq-length 512 --add-special-tokens False"
    done = penstock_command(*words.split(), "--max-tokens", 12, PROMPT)
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_the_line_of_the_document(expected: str, penstock_command: Run, tmp_path: Path) -> None:
    """Its command with our names in front, and every option that it lists."""
    config = tmp_path / "config.ini"
    config.write_text("[model]\nmax_tokens = 64\n")
    words = f"infer --device_id 0 --model_name bloom --prefill_model_path {DEMO} --increment_model_path {DEMO}"
    words += f" --config_path {config} --is_sample_acceleration True --add_special_tokens False --stream True"
    words += " --seq_length 512 --model_type penstock --rank_id 0 --target cpu --max_tokens 12"
    done = penstock_command(*words.split(), PROMPT)
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_lines_are_answered_as_they_come(expected: str, penstock_command: Run) -> None:
    for options in (["--stream"], ["--backend", "lite"], ["--backend", "lite", "--stream", "True"]):
        done = penstock_command(
            "infer", "--model", DEMO, "--max-tokens", 12, "--temperature", 0, *options, stdin=f"{PROMPT}\n\n{PROMPT}\n"
        )
        assert (done.returncode, done.stdout) == (0, expected * 2)


def test_several_prompts_and_objects(expected: str, penstock_command: Run, tmp_path: Path) -> None:
    (tmp_path / "small.psm").symlink_to(DEMO)
    words = "infer --model-name small --max-tokens 12 --temperature 0 --top_k 4 --top_p 0.9 --json"
    done = penstock_command(*words.split(), PROMPT, "a", PENSTOCK_MODELS=str(tmp_path))
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [len(one["token_ids"]) for one in found] == [12, 12]
    assert found[0]["text"] + "\n" == expected
    assert found[0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", DEMO, "--device-id", "1"], "--device-id must be 0, not 1"),
        (["--model", DEMO, "--device_id", "1"], "--device-id must be 0, not 1"),
        (["--model", DEMO, "--rank-id", "2"], "--rank-id must be 0, not 2"),
        (["--model", DEMO, "--seq-length", "-1"], "infer_seq_length: expected an integer from 0"),
        (["--model", DEMO, "--infer_seq_length", "-1"], "infer_seq_length: expected an integer from 0"),
        (["--model", DEMO, "--seq-length", "999999"], "infer_seq_length 999999 is more than the model's 1024"),
        (["--model", DEMO, "--threads", "1025"], "threads: expected an integer from 0 to 1024"),
        (["--model", DEMO, "--model-type", "mindir"], "--model-type must be 'penstock', a bundle (.psm), not 'mindir'"),
        (["--model", DEMO, "--target", "Ascend"], "target: expected 'cpu', got 'Ascend'"),
        (["--model", DEMO, "--prefill-model-path", DEMO], "--prefill-model-path: cannot be combined with model"),
        (["--model", DEMO, "--stream", "--json"], "--stream cannot be combined with --json"),
        (
            ["--model", DEMO, "--is-sample-acceleration", "True", "--temperature", "1"],
            "--temperature: the bundle ends in",
        ),
        ([], "--model, --prefill-model-path or --model-name is required"),
    ],
)
def test_wrong_options_are_refused_with_a_reason(
    options: list[object], words: str, penstock_inline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_MODELS", "")
    done = penstock_inline("infer", PROMPT, *options)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_prompt_behind_a_switch_is_wrong_usage(penstock_command: Run) -> None:
    done = penstock_command("infer", "--model", DEMO, "--stream", PROMPT)
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected True or False, got 'I love" in done.stderr


def test_a_model_that_no_folder_has_is_named(penstock_command: Run) -> None:
    done = penstock_command("infer", PROMPT, "--model-name", "none", PENSTOCK_MODELS="")
    assert (done.returncode, done.stdout) == (1, "")
    assert "set PENSTOCK_MODELS" in done.stderr


def test_a_prompt_that_is_not_utf8_is_named(penstock_command: Run) -> None:
    done = penstock_command("infer", "--model", DEMO, PROMPT, "a\udcff")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "penstock: prompt 2 is not UTF-8 text at byte 1\n"
