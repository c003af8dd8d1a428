"""One reader for the YAML files that name a model: AutoModel, pipelines and `penstock infer` agree on each."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import AutoModel, SamplingParams, pipeline
from penstock.cli.main import main
from penstock.errors import InvalidArgumentError, InvalidFileError, PenstockError, UnsupportedError
from penstock.offline.backends import llm_options
from penstock.offline.model_file import read_model_file
from penstock.offline.sources import find_file
from tests.support.errors import raises
from tests.support.lite_demo import BUNDLE, FOLDER

PROMPT = "def add(a, b):"
MINDFORMERS = f"""
seed: 0
run_mode: 'train'
use_parallel: {{parallel}}
parallel_config: {{{{data_parallel: 1, model_parallel: 1, pipeline_stage: 1}}}}
load_checkpoint: {BUNDLE}
trainer: {{{{type: CausalLanguageModelingTrainer}}}}
runner_config: {{{{epochs: 2}}}}
model:
  arch: {{{{type: LlamaForCausalLM}}}}
  model_config:
    type: LlamaConfig
    num_layers: 32
    use_past: False
    seq_length: 64
    top_k: 3
    temperature: 0.7
    do_sample: False
    max_decode_length: 16
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def from_config(file: Path) -> list[int]:
    with AutoModel.from_config(file) as model:
        ids = model.llm.tokenizer.encode(PROMPT)
        return model.generate(ids, ignore_eos=True)[0][len(ids) :]


def from_pipeline(file: Path, backend: str = "graph") -> list[int]:
    with pipeline(model=file, backend=backend) as generate:
        return generate(PROMPT, ignore_eos=True).token_ids


def from_command(file: Path, capsys: pytest.CaptureFixture[str]) -> list[int]:
    assert main(["infer", "--model", str(file), PROMPT, "--json", "--ignore-eos"]) == 0
    ids: list[int] = json.loads(capsys.readouterr().out)["token_ids"]
    return ids


@pytest.mark.parametrize(
    "text",
    [
        MINDFORMERS.format(parallel="False"),
        MINDFORMERS.format(parallel="True"),
        f"load_checkpoint: {BUNDLE}\n"
        "model:\n  model_config: {max_new_tokens: 8, repetition_penalty: 1.3, do_sample: false}\n",
        f"infer:\n  prefill_model_path: {BUNDLE}\n  increment_model_path: {BUNDLE}\n  infer_seq_length: 24\n"
        "model:\n  model_config: {is_sample_acceleration: true, do_sample: false}\n",
    ],
)
def test_a_file_means_the_same_to_every_reader(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    file = written(tmp_path / "run.yaml", text)
    ids = from_config(file)
    assert from_pipeline(file) == from_command(file, capsys) == ids
    assert from_pipeline(file, "lite") == ids
    with pipeline(model=BUNDLE) as generate:
        assert len(ids) == len(generate(PROMPT, ignore_eos=True, max_new_tokens=len(ids)).token_ids) < 24
    used_otherwise = ["trainer", "runner_config", "seed", "model.arch", "model_config.num_layers", "use_past: False"]
    for record in caplog.records:
        assert text.startswith("\nseed")
        assert all(name in record.getMessage() for name in used_otherwise)
        assert "do_sample" not in record.getMessage()
    assert len(caplog.records) == (4 if text.startswith("\nseed") else 0)  # one for each reader


def test_defaults_of_a_file_are_those_that_the_call_leaves_open(tmp_path: Path) -> None:
    file = written(tmp_path / "run.yaml", MINDFORMERS.format(parallel="False"))
    with pipeline(model=file) as generate, pipeline(model=BUNDLE) as plain:
        given = SamplingParams(temperature=0.9, seed=3, max_tokens=5, ignore_eos=True)
        expected = plain(PROMPT, params=replace(given, top_k=3)).token_ids
        assert generate(PROMPT, params=given).token_ids == expected
        both = generate([PROMPT, "import os\nimport sys\n"], ignore_eos=True)
        assert [len(result.prompt_token_ids) + len(result.token_ids) for result in both] == [16, 16]
        assert list(generate(PROMPT, stream=True, ignore_eos=True))[-1].finish_reason == "length"
        with raises(InvalidArgumentError, param="max_length"):
            generate(list(range(5, 40)))


def test_do_sample_of_a_call_takes_the_filters_of_the_file(tmp_path: Path) -> None:
    """The demo's generation_config.json has a temperature and top_k as well, which the file replaces."""
    file = written(tmp_path / "run.yaml", f"load_checkpoint: {BUNDLE}\nmodel: {{model_config: {{temperature: 1.9}}}}\n")
    call: dict[str, Any] = {"seed": 3, "max_new_tokens": 9, "ignore_eos": True}
    with pipeline(model=file) as generate, pipeline(model=BUNDLE) as plain:
        expected = [plain(PROMPT, temperature=1.9, top_k=top_k, **call).token_ids for top_k in (40, 300)]
        assert expected[0] != expected[1]
        assert generate(PROMPT, do_sample=True, **call).token_ids == expected[0]
        assert generate(PROMPT, do_sample=True, top_k=300, **call).token_ids == expected[1]
        with raises(UnsupportedError, param="temperature"):
            generate(PROMPT, do_sample=True, is_sample_acceleration=True)


@pytest.mark.parametrize(
    ("text", "kind", "param"),
    [
        ("run_mode: export\n", InvalidFileError, "load_checkpoint"),
        ("load_checkpoint: nowhere\n", PenstockError, "load_checkpoint"),
        ("load_checkpoint: llama2_7b.ckpt\n", UnsupportedError, "load_checkpoint"),
        ("load_chekpoint: a\n", InvalidFileError, "load_chekpoint"),
        (f"load_checkpoint: {FOLDER}\nsrc_strategy_path_or_dir: a\n", PenstockError, "src_strategy_path_or_dir"),
        ("only_save_strategy: True\n", UnsupportedError, "only_save_strategy"),
        ("parallel_config: {model_paralel: 2}\n", InvalidFileError, "model_paralel"),
        ("load_checkpoint: rank_0_graph.mindir\n", UnsupportedError, "load_checkpoint"),
        ("network: net.py:Net\n", UnsupportedError, "network"),
        ("scheme: w3\n", InvalidFileError, "scheme"),
        ("use_parallel: 2\n", InvalidFileError, "use_parallel"),
        ("parallel_config: {model_parallel: 0}\n", InvalidFileError, "parallel_config.model_parallel"),
        ("model:\n  model_config: {seq_length: many}\n", InvalidFileError, "model_config.seq_length"),
        ("model:\n  model_config: {top_k: -3}\n", InvalidFileError, "top_k"),
        ("model:\n  model_config: {max_decode_length: 0}\n", InvalidFileError, "model_config.max_decode_length"),
    ],
)
def test_every_reader_refuses_the_same(
    text: str, kind: type[PenstockError], param: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "run.yaml", text)
    errors = []
    for read in (AutoModel.from_config, lambda path: pipeline(model=path)):
        with pytest.raises(kind) as caught:
            read(file)
        assert caught.value.param == param
        errors.append(str(caught.value))
    assert main(["infer", "--model", str(file), "x"]) == 1
    assert {*errors} == {capsys.readouterr().err.removeprefix("penstock: ").rstrip("\n")}


def test_a_section_that_is_not_used_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = written(tmp_path / "run.yaml", f"load_checkpoint: {BUNDLE}\nnotes: mine\n")
    with caplog.at_level(logging.WARNING):
        assert find_file(file).bundle == BUNDLE
    assert ["'notes'" in record.getMessage() for record in caplog.records] == [True]


def test_ranks_scheme_and_limits_of_a_file_become_options(tmp_path: Path) -> None:
    text = f"""
load_checkpoint: {FOLDER}
scheme: w8a8
use_parallel: True
parallel_config: {{data_parallel: 4, model_parallel: 2, pipeline_stage: 1, context_parallel: 3}}
infer: {{config_path: m.ini, infer_seq_length: 64}}
"""
    written(tmp_path / "m.ini", "[model]\nbatch_size = 4\nverify = true\n")
    config = find_file(written(tmp_path / "run.yaml", text))
    options: dict[str, Any] = llm_options(config)
    limits = options.pop("limits")
    assert (limits.context_len, limits.max_requests) == (64, 4)
    assert options == {
        "scheme": "w8a8", "verify": "always", "tensor_parallel_size": 2, "context_parallel_size": 3,
    }  # fmt: skip
    with raises(UnsupportedError, param="use_parallel"):
        pipeline(model=tmp_path / "run.yaml", backend="lite")
    alone = read_model_file(written(tmp_path / "one.yaml", text.replace("use_parallel: True", "use_parallel: False")))
    assert alone.ranks == {}


def test_ranks_of_a_file_run_the_model(tmp_path: Path) -> None:
    text = MINDFORMERS.format(parallel="True").replace("model_parallel: 1", "model_parallel: 2")
    file = written(tmp_path / "run.yaml", text)
    with AutoModel.from_config(file) as model:
        assert model.llm.info.num_ranks == 2
        ids = model.generate([5, 6, 7], ignore_eos=True)
    with AutoModel.from_config(written(file, MINDFORMERS.format(parallel="False"))) as model:
        assert model.generate([5, 6, 7], ignore_eos=True) == ids
