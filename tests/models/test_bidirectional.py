"""Networks whose attention is not causal: prompts run whole and uncached, equal to plain PyTorch, or are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock import LLM, SamplingParams, lite
from penstock.engine.options import RequestOptions
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.export import export_bundle
from penstock.offline.lite_generator import LiteGenerator
from penstock.runtime.program import ProgramLimits, pages_for
from tests.models.steps import relative_error, run_whole
from tests.support.errors import raises
from tests.support.my_network import CONFIG, SCRIPT, plain_logits, tensors  # noqa: F401 - a fixture

LIMITS = ProgramLimits(80, 3, num_pages=16, context_len=96)


@pytest.fixture(scope="module")
def folder(tensors: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    folder = tmp_path_factory.mktemp("encoder")
    source = SCRIPT.read_text()
    assert "config.width // config.num_heads)" in source
    encoder = source.replace("config.width // config.num_heads)", "config.width // config.num_heads, causal=False)")
    (folder / "encoder.py").write_text(encoder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def bundle(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder-bundle") / "encoder.psm"
    export_bundle(folder, path, network=f"{folder / 'encoder.py'}:Net")
    return path


@pytest.fixture(params=["graph", "eager"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def llm(folder: Path, bundle: Path, mode: str) -> Iterator[LLM]:
    if mode == "graph":
        model = LLM(bundle, limits=LIMITS)
    else:
        model = LLM(folder, mode="eager", limits=LIMITS, network=f"{folder / 'encoder.py'}:Net")
    with model:
        yield model


def prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(3)
    shared = random.integers(0, 103, 64).tolist()
    return [[*shared, *random.integers(0, 103, 96).tolist()][:length] for length in lengths]


def test_logits_equal_plain_pytorch(llm: LLM, tensors: dict[str, np.ndarray]) -> None:  # noqa: F811
    for ids in prompts(1, 33, 70, 80, 70):
        assert relative_error(llm.logits(ids), plain_logits(tensors, ids, causal=False)) < 1e-4


def test_a_first_token_is_that_of_the_whole_prompt(llm: LLM, tensors: dict[str, np.ndarray]) -> None:  # noqa: F811
    several = prompts(70, 66, 79, 65, 2, 70)  # with equal first pages, more than a step holds
    results = llm.generate(several, SamplingParams(max_tokens=1, temperature=0))
    for ids, result in zip(several, results, strict=True):
        expected = plain_logits(tensors, ids, causal=False)[-1]
        assert expected.max() - expected[result.token_ids[0]] < 1e-4
        assert result.num_cached_tokens == 0
    assert llm.generate([5, 6]).token_ids == llm.generate([5, 6], SamplingParams(max_tokens=1)).token_ids


def test_scores_are_those_of_the_logits(llm: LLM) -> None:
    for ids in prompts(70, 80, 70):
        rows = llm.logits(ids)
        total = sum(row[token] - np.log(np.exp(row).sum()) for row, token in zip(rows, ids[1:], strict=False))
        assert abs(llm.score(ids).total() - total) < 1e-3


def test_embeddings_are_the_same_in_any_company(llm: LLM) -> None:
    several = prompts(70, 66, 79, 64)
    together = llm.embed(several)
    for ids, one in zip(several, together, strict=True):
        alone = llm.embed(ids, pooling="mean")
        assert alone.vector.tobytes() == one.vector.tobytes()
        assert one.num_cached_tokens == 0
        last = llm.embed(ids, pooling="last")
        assert (last.num_cached_tokens, llm.embed(ids, pooling="last").vector.tobytes()) == (0, last.vector.tobytes())


def test_pages_are_those_of_steps(bundle: Path) -> None:
    """The default number does not grow with the context, and every mix of lengths runs."""
    several = prompts(*(1, 33, 64) * 20)
    with (
        LLM(bundle, limits=ProgramLimits(64, 8)) as few,
        LLM(bundle, limits=ProgramLimits(64, 8, num_pages=100)) as many,
    ):
        assert few.engine.program.limits.num_pages == 2 * (2 + 8) < pages_for(few.info.context_len) * 8
        for one, other in zip(few.embed(several, "mean"), many.embed(several, "mean"), strict=True):
            assert one.vector.tobytes() == other.vector.tobytes()


def test_several_answers_compute_their_prompt_each(llm: LLM) -> None:
    (ids,) = prompts(70)
    result = llm.generate(ids, SamplingParams(n=4, max_tokens=1, temperature=0))
    assert len({choice.token_ids[0] for choice in result.choices}) == 1


def test_a_second_token_is_refused(llm: LLM) -> None:
    for call in (llm.generate, llm.stream):
        with raises(UnsupportedError, param="max_tokens", match=r"got 2\. .*not causal"):
            call([5, 6], SamplingParams(max_tokens=2))
    with raises(UnsupportedError, param="max_tokens"):
        llm.engine.submit([5, 6], llm._defaults.__class__(max_tokens=3))


def test_a_prompt_longer_than_a_step_is_refused(llm: LLM) -> None:
    (ids,) = prompts(81)
    for call in (llm.embed, llm.score, llm.logits):
        with raises(InvalidArgumentError, param="prompt", match="has 81"):
            call(ids)
    kept = llm.embed(ids, options=RequestOptions(truncate_prompt=True))
    assert kept.token_ids == ids[1:]


def test_rows_of_a_prompt_must_fit_a_step(bundle: Path) -> None:
    limits = ProgramLimits(80, 3, max_rows=10, num_pages=16, context_len=96)
    with LLM(bundle, limits=limits) as llm:
        assert len(llm.score(prompts(10)[0]).token_ids) == 10
        with raises(InvalidArgumentError, param="prompt", match="has 10"):
            llm.score(prompts(11)[0])


def test_programs_refuse_a_second_step(llm: LLM) -> None:
    with pytest.raises(UnsupportedError, match=r"^positions(\[0\])?: .*0.*not causal"):
        run_whole(llm.engine.program, prompts(70)[0], 40)


def test_lite_runs_whole_sequences_or_refuses(bundle: Path, tensors: dict[str, np.ndarray]) -> None:  # noqa: F811
    several = prompts(70, 33)
    ids = np.zeros((2, 70), np.int32)
    for row, one in enumerate(several):
        ids[row, : len(one)] = one
    with lite.Model() as model:
        model.build_from_file(
            bundle, lite.ModelType.PENSTOCK, None, {"batch_size": 2, "seq_len": 70, "context_len": 96, "max_tokens": 80}
        )
        counts, reset = lite.Tensor(np.array([70, 33], np.int32)), lite.Tensor(np.ones(2, np.int32))
        (logits,) = model.predict([lite.Tensor(ids), counts, reset])
        for one, row in zip(several, logits.get_data_to_numpy(), strict=True):
            assert relative_error(row, plain_logits(tensors, one, causal=False)[-1]) < 1e-4
        with raises(InvalidArgumentError, param="reset", match="has 70"):
            model.predict(
                [lite.Tensor(ids), lite.Tensor(np.array([1, 0], np.int32)), lite.Tensor(np.zeros(2, np.int32))]
            )
        generator = LiteGenerator(model, 2)
        with raises(UnsupportedError, param="max_tokens", match=r"got 2\. .*not causal"):
            generator.generate([several[0]], SamplingParams(max_tokens=2))
        assert len(generator.generate([several[0]], SamplingParams(temperature=0))[0].token_ids) == 1
        generator._sampler.close()
        small = {"batch_size": 2, "seq_len": 70, "context_len": 96, "max_tokens": 69}
        model.build_from_file(bundle, lite.ModelType.PENSTOCK, None, small)
        with raises(InvalidArgumentError, param="num_tokens", match="got 70"):
            model.predict([lite.Tensor(ids), counts, reset])
