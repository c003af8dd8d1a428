"""T5 and UMT5 against transformers in float32, and requests that begin and go on beside others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock import LLM, SamplingParams
from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.config import ConfigReader
from penstock.engine.prompts import begin_decoder
from penstock.errors import PenstockError, UnsupportedError
from penstock.models.encoder_decoder.t5 import Config, distance_buckets
from penstock.models.mapped import open_mapped
from penstock.runtime.program import ProgramLimits
from tests.models.steps import relative_error
from tests.support.errors import raises
from tests.support.marks import mostly_long

LIMITS = ProgramLimits(150, 3, num_pages=24, context_len=200)
_SMALL: dict[str, Any] = {"vocab_size": 503, "d_model": 80, "d_kv": 24, "d_ff": 100, "num_layers": 2, "num_heads": 3}
_SMALL |= {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 40, "decoder_start_token_id": 0}
_OLD = {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 3}

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", {"num_decoder_layers": 3}),
    "umt5": ("umt5", {}),
    "t5_gated": ("t5", {"feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 32}),
    "t5_unscaled": ("t5", _OLD),
    "umt5_relu": ("umt5", {"feed_forward_proj": "relu", "num_layers": 3}),
}


def build(name: str, *, only_encoder: bool = False) -> transformers.PreTrainedModel:
    model_type, changes = ROWS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **(_SMALL | changes))
    config._attn_implementation = "eager"
    kind = {"t5": "T5", "umt5": "UMT5"}[model_type] + ("EncoderModel" if only_encoder else "ForConditionalGeneration")
    model = getattr(transformers, kind)(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(1.0 + 0.2 * torch.randn_like(parameter))
            elif parameter_name.endswith("bias.weight"):
                parameter.copy_(torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("t5")
    build("t5").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def t5(folder: Path) -> Iterator[LLM]:
    with LLM(folder, limits=LIMITS) as llm:
        yield llm


def tokens(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng((length, seed)).integers(1, 503, length).tolist()


def expected_logits(model: transformers.PreTrainedModel, encoder: list[int], decoder: list[int]) -> np.ndarray:
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor([encoder]), "decoder_input_ids": torch.tensor([decoder])}
        logits: np.ndarray = model(**inputs, attention_mask=torch.ones(1, len(encoder))).logits[0].numpy()
    return logits


@pytest.mark.parametrize("name", mostly_long(ROWS, "t5"))
def test_logits_match_transformers(name: str, folder: Path, tmp_path: Path) -> None:
    model = build(name)
    if name != "t5":
        folder = tmp_path
        model.save_pretrained(folder)
    found = {}
    for mode in ("graph", "eager"):
        with LLM(folder, mode=mode, limits=LIMITS) as llm:
            for sizes in ((1, 1), (33, 90), (100, 50)):
                encoder, decoder = tokens(sizes[0]), [0, *tokens(sizes[1] - 1, 1)]
                logits = llm.logits([*encoder, *decoder])[len(encoder) :]
                assert relative_error(logits, expected_logits(model, encoder, decoder)) < 1e-4
                assert found.setdefault(sizes, logits.tobytes()) == logits.tobytes()


def test_answers_are_those_of_transformers(t5: LLM) -> None:
    model = build("t5")
    several = [tokens(length) for length in (5, 64, 97, 1)]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    for ids, result in zip(several, t5.generate(several, params), strict=True):
        rows = expected_logits(model, ids, [0, *result.token_ids])
        for row, token in zip(rows, result.token_ids, strict=False):
            assert row.max() - row[token] < 1e-4 * abs(row).max()
        assert t5.generate([*ids, 0], params).token_ids == result.token_ids


def test_samples_are_the_same_in_any_company(t5: LLM, folder: Path) -> None:
    several = [tokens(length, 2) for length in (60, 28, 62)]
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, ignore_eos=True, logprobs=1)
    alone = [t5.generate(ids, params) for ids in several]
    small = ProgramLimits(150, 3, num_pages=7, context_len=192)  # too few pages for all, so requests are preempted
    with LLM(folder, limits=small) as llm:
        for results in (t5.generate(several, params), llm.generate(several, params)):
            for one, other in zip(alone, results, strict=True):
                assert one.token_ids == other.token_ids
                assert one.choices[0].logprobs == other.choices[0].logprobs
        assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.long
def test_a_quantized_folder_has_the_bits_of_its_scheme(folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(open_mapped(folder), tmp_path / "quantized", "w8a8")
    ids = [*tokens(70), 0, *tokens(9)]
    with LLM(folder, scheme="w8a8", limits=LIMITS) as whole, LLM(tmp_path / "quantized", limits=LIMITS) as own:
        assert whole.logits(ids)[70:].tobytes() == own.logits(ids)[70:].tobytes()


@pytest.mark.parametrize("mode", mostly_long(["graph", "eager"], "eager"))
def test_an_encoder_gives_vectors(mode: str, tmp_path: Path) -> None:
    model = build("umt5", only_encoder=True)
    model.save_pretrained(tmp_path)
    with LLM(tmp_path, mode=mode, limits=LIMITS) as llm:
        for length in (1, 70, 149):
            ids = tokens(length)
            with torch.no_grad():
                rows = model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, length)).last_hidden_state[0]
            assert relative_error(llm.embed(ids, normalize=False).vector, rows.mean(dim=0).numpy()) < 1e-4
        with raises(UnsupportedError, param="model"):
            llm.generate([5, 6])


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize(("num_buckets", "reach"), [(32, 128), (12, 40), (8, 20)])
def test_buckets_are_those_of_transformers(looks_ahead: bool, num_buckets: int, reach: int) -> None:
    attention = transformers.models.t5.modeling_t5.T5Attention
    distances = torch.arange(-reach, reach + 1)
    expected = attention._relative_position_bucket(distances, looks_ahead, num_buckets, reach)
    assert distance_buckets(num_buckets, reach, looks_ahead=looks_ahead) == expected.tolist()


def test_what_has_no_meaning_is_refused(t5: LLM) -> None:
    with raises(UnsupportedError, param="embed"):
        t5.embed(tokens(5))
    for call in (t5.score, lambda ids: t5.generate(ids, SamplingParams(prompt_logprobs=1))):
        with raises(UnsupportedError, param="prompt_logprobs"):
            call(tokens(5))
    with raises(PenstockError, param="prompt", match="one step"):
        t5.generate(tokens(149))


def test_the_decoder_begins_once() -> None:
    assert begin_decoder([3, 4], 0) == [3, 4, 0]
    assert begin_decoder([0], 0) == [0, 0]
    assert begin_decoder([3, 0, 4], 0) == [3, 0, 4]
    assert begin_decoder([3], -1) == [3]
    assert begin_decoder([], 0) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["T5ForTokenClassification"]),
        ("feed_forward_proj", "gated-silu"),
        ("relative_attention_num_buckets", 30),
        ("relative_attention_max_distance", 3),
        ("decoder_start_token_id", 503),
    ],
)
def test_other_values_are_refused_by_name(key: str, value: object) -> None:
    with raises(PenstockError, param=key):
        Config.read(ConfigReader(_SMALL | {key: value}))
