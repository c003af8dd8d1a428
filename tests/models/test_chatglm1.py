"""ChatGLM 1 against a plain PyTorch network, and requests that begin and go on beside others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import LLM, SamplingParams, lite
from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.config import ConfigReader
from penstock.errors import PenstockError, UnsupportedError
from penstock.graph.export import export_bundle
from penstock.models.families import network_type
from penstock.models.mapped import open_mapped
from penstock.models.published.chatglm1 import Config
from penstock.runtime.program import ProgramLimits
from tests.models.steps import relative_error
from tests.support.errors import raises
from tests.support.own_references import ChatGLM1

LIMITS = ProgramLimits(150, 3, num_pages=24, context_len=200)
BEGIN = 502
VALUES: dict[str, Any] = {"model_type": "chatglm", "vocab_size": 503, "hidden_size": 96, "inner_hidden_size": 100}
VALUES |= {"num_layers": 3, "num_attention_heads": 4, "max_sequence_length": 256, "layernorm_epsilon": 1e-5}
VALUES |= {"bos_token_id": BEGIN, "position_encoding_2d": True, "pre_seq_len": None, "quantization_bit": 0}


@pytest.fixture(scope="module")
def model() -> ChatGLM1:
    torch.manual_seed(0)
    built = ChatGLM1(VALUES).fill()
    assert isinstance(built, ChatGLM1)
    return built


@pytest.fixture(scope="module")
def folder(model: ChatGLM1, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chatglm1")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, limits=LIMITS) as llm:
        yield llm


def tokens(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng((length, seed)).integers(1, BEGIN, length).tolist()


def expected_logits(model: ChatGLM1, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([ids])).logits[0].numpy()
    return logits


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_logits_match_plain_pytorch(mode: str, folder: Path, model: ChatGLM1, llm: LLM) -> None:
    with LLM(folder, mode=mode, limits=LIMITS) as own:
        for sizes in ((1, 1), (33, 90), (2, 140), (100, 50)):
            ids = [*tokens(sizes[0]), BEGIN, *tokens(sizes[1] - 1, 1)]
            logits = own.logits(ids)
            assert relative_error(logits, expected_logits(model, ids)) < 1e-4
            assert llm.logits(ids).tobytes() == logits.tobytes()


def test_answers_are_those_of_plain_pytorch(llm: LLM, model: ChatGLM1) -> None:
    several = [tokens(length) for length in (5, 64, 97, 1)]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    for ids, result in zip(several, llm.generate(several, params), strict=True):
        rows = expected_logits(model, [*ids, BEGIN, *result.token_ids])[len(ids) :]
        for row, token in zip(rows, result.token_ids, strict=False):
            assert row.max() - row[token] < 1e-4 * abs(row).max()
        assert llm.generate([*ids, BEGIN], params).token_ids == result.token_ids


def test_samples_are_the_same_in_any_company(llm: LLM, folder: Path) -> None:
    several = [tokens(length, 2) for length in (60, 28, 62)]
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, ignore_eos=True, logprobs=1)
    alone = [llm.generate(ids, params) for ids in several]
    small = ProgramLimits(150, 3, num_pages=7, context_len=192)  # too few pages for all, so requests are preempted
    with LLM(folder, limits=small) as other_llm:
        for results in (llm.generate(several, params), other_llm.generate(several, params)):
            for one, other in zip(alone, results, strict=True):
                assert one.token_ids == other.token_ids
                assert one.choices[0].logprobs == other.choices[0].logprobs
        assert other_llm.engine.scheduler.num_preemptions > 0


def test_a_bundle_and_a_quantized_folder_have_the_bits(folder: Path, tmp_path: Path, llm: LLM) -> None:
    ids = [*tokens(70), BEGIN, *tokens(9)]
    export_bundle(folder, tmp_path / "model.psm")
    with LLM(tmp_path / "model.psm", limits=LIMITS) as bundle:
        assert bundle.logits(ids).tobytes() == llm.logits(ids).tobytes()
    quantize_checkpoint(open_mapped(folder), tmp_path / "quantized", "w8a8")
    with LLM(folder, scheme="w8a8", limits=LIMITS) as whole, LLM(tmp_path / "quantized", limits=LIMITS) as own:
        assert whole.logits(ids).tobytes() == own.logits(ids).tobytes()


def test_what_a_prefix_cannot_do_is_refused(llm: LLM) -> None:
    with raises(UnsupportedError, param="embed"):
        llm.embed(tokens(5))
    with raises(UnsupportedError, param="prompt_logprobs"):
        llm.score(tokens(5))
    with raises(PenstockError, param="prompt", match="one step"):
        llm.generate(tokens(150))


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_an_answer_inside_the_prompt_is_refused(folder: Path, tmp_path: Path, mode: str) -> None:
    gmask, mask, params = 500, 499, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    values = VALUES | {"gmask_token_id": gmask, "mask_token_id": mask}
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model/config.json").write_text(json.dumps(values))
    with LLM(tmp_path / "model", mode=mode, limits=LIMITS) as llm:
        for ids in ([5, 7, gmask], [5, 7, mask], [5, 7, gmask, BEGIN, 8], [mask, 7, gmask]):  # [gMASK] has priority
            llm.generate(ids, params)
        for ids in ([5, mask, 7], [5, gmask, 7, BEGIN], [gmask, 7, mask], [mask, gmask, 7], [5, BEGIN, gmask]):
            with raises(UnsupportedError, param="prompt", match="as the last one before the answer, got it at"):
                llm.generate(ids, params)


def test_ranks_and_lite_refuse_a_prefix(folder: Path, tmp_path: Path) -> None:
    for name in ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size"):
        with raises(UnsupportedError, param=name, match="expected 1 for a network with a prefix"):
            LLM(folder, limits=LIMITS, **{name: 2})
    export_bundle(folder, tmp_path / "model.psm")
    with raises(UnsupportedError, param="model_path", match="chatglm, which has a prefix"):
        lite.Model().build_from_file(str(tmp_path / "model.psm"), lite.ModelType.PENSTOCK)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("position_encoding_2d", False), ("prefix_projection", True), ("pre_seq_len", 128), ("quantization_bit", 4),
        ("bos_token_id", 503), ("num_attention_heads", 48),
    ],
)  # fmt: skip
def test_other_configs_are_refused_by_name(key: str, value: Any) -> None:
    with raises(PenstockError, param=key):
        Config.read(ConfigReader(VALUES | {key: value}))


def test_the_config_tells_which_chatglm_it_is() -> None:
    assert network_type(VALUES) == "chatglm1"
    assert network_type(VALUES | {"position_encoding_2d": False}) == "chatglm"
    assert network_type({"model_type": "chatglm"}) == "chatglm"
    assert network_type({"model_type": "llama", "position_encoding_2d": True}) == "llama"
