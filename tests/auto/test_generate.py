"""``generate`` against transformers: the same calls on a tiny network give the same tokens and scores."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers

from penstock import AutoModel, InvalidArgumentError, PenstockError, SamplingParams, UnsupportedError, pipeline
from penstock.checkpoint.generation import read_generation_config
from penstock.engine.params import ResolvedSampling
from penstock.llm.generate import options as generate_options
from penstock.llm.generate.options import read_options
from penstock.llm.resolve import default_sampling
from tests.support.errors import raises
from tests.support.families import build, prompt, save

PROMPT = [int(token) for token in prompt(40)]
NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save("llama", tmp_path_factory.mktemp("generate"))


@pytest.fixture(scope="module")
def ours(folder):
    with AutoModel.from_pretrained(folder, scheme="f32", kv_cache="f32", max_requests=8) as model:
        yield model


@pytest.fixture(scope="module")
def theirs():
    model = build("llama")
    model.generation_config = transformers.GenerationConfig(pad_token_id=1)  # 0 is none to theirs
    return model


def reference(model, ids, **options):
    with torch.no_grad():
        return model.generate(torch.tensor([ids]), return_dict_in_generate=True, output_scores=True, **options)


def greedy_tokens(model, ids=PROMPT, **options):
    return model.generate([ids], max_new_tokens=NEW, do_sample=False, **options)[0][len(ids) :]


def test_sampling_options_are_those_of_transformers(ours, theirs):
    plain = greedy_tokens(ours)
    cases = [
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
        {"bad_words_ids": [[plain[0]], [plain[1], plain[2]], [PROMPT[-1], plain[3]]]},
        {"bad_words_ids": [PROMPT[-2:] + plain[:1]]},
        {"forced_eos_token_id": 7},
        {"forced_bos_token_id": 9},
        {"eos_token_id": plain[3], "min_new_tokens": 8, "bad_words_ids": [[plain[3]], [plain[5]]]},
    ]
    for options in cases:
        for ids in (PROMPT, PROMPT[:1]):
            expected = reference(theirs, ids, max_new_tokens=NEW, do_sample=False, **options)
            assert greedy_tokens(ours, ids, **options) == expected.sequences[0, len(ids) :].tolist(), options
            hooked = ours.generate([ids], max_new_tokens=NEW, do_sample=False, output_scores=True, **options)
            assert hooked.sequences[0] == expected.sequences[0].tolist(), options
            rows = torch.cat(expected.scores).numpy()
            np.testing.assert_allclose(hooked.scores[0], rows, rtol=1e-4, atol=1e-4)


def test_scores_have_minus_infinity_where_filters_cut(ours, theirs):
    warm = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.2}
    found = ours.generate([PROMPT], max_new_tokens=4, do_sample=True, seed=3, output_scores=True, **warm)
    again = ours.generate([PROMPT], max_new_tokens=4, do_sample=True, seed=3, **warm)
    assert again == found.sequences
    for ids, step in ((found.sequences[0][: len(PROMPT) + i], i) for i in range(4)):
        expected = reference(theirs, ids, max_new_tokens=1, do_sample=True, **warm).scores[0][0].numpy()
        row = found.scores[0][step]
        assert (np.isfinite(row) == np.isfinite(expected)).all()
        np.testing.assert_allclose(row[np.isfinite(row)], expected[np.isfinite(row)], rtol=1e-3, atol=1e-3)
        assert np.isfinite(row[found.sequences[0][len(PROMPT) + step]])


@pytest.mark.parametrize(
    "file",
    [
        {},
        {"temperature": 0.6, "top_k": 7, "min_p": 0.1},
        {"do_sample": False, "top_p": 0.9, "typical_p": 0.5},
        {"do_sample": True, "top_k": 0},
        {"do_sample": True, "temperature": 0.7, "top_p": 0.8},
    ],
    ids=str,
)
def test_calls_that_sample_have_transformers_defaults(theirs, file):
    """What the call leaves open is that of the file, also of one without do_sample, or that of transformers."""
    own, theirs.generation_config = theirs.generation_config, transformers.GenerationConfig(**file)
    defaults = read_generation_config({"generation_config.json": json.dumps(file).encode()})
    calls = [{}, {"do_sample": True}, {"do_sample": False}, {"do_sample": True, "top_k": 0, "temperature": None},
             {"do_sample": True, "temperature": 0.9, "top_p": 0.5}, {"do_sample": True, "top_k": 5}]  # fmt: skip
    for call in calls:
        config = transformers.GenerationConfig(**call)
        expected, _ = theirs._prepare_generation_config(config)
        for read in (
            read_options((), call, defaults),
            read_options((call,), {}, defaults),
            read_options((config,), {}, defaults),
        ):
            found = ResolvedSampling.of(read.params, default_sampling(defaults, "", False))
            assert (found.temperature > 0) == expected.do_sample, call
            for name in ("temperature", "top_k", "top_p", "min_p", "typical_p") if expected.do_sample else ():
                assert getattr(found, name) == (getattr(expected, name) or 0), (call, name)
    theirs.generation_config = own


def test_without_top_k_the_50_likeliest_tokens_are_drawn(ours, theirs):
    expected = reference(theirs, PROMPT, max_new_tokens=1, do_sample=True).scores[0][0].numpy()
    found = ours.generate(PROMPT, 1, do_sample=True, output_scores=True).scores[0][0]
    assert np.isfinite(expected).sum() == 50
    assert (np.isfinite(found) == np.isfinite(expected)).all()
    (_, *drawn), (_, *every) = (
        ours.llm.generate([PROMPT], SamplingParams(max_tokens=NEW, temperature=1, seed=3, top_k=top_k))[0].token_ids
        for top_k in (50, 0)
    )
    assert drawn != every  # LLM has vLLM's defaults
    assert ours.generate(PROMPT, NEW, do_sample=True, seed=3)[0][-len(drawn) :] == drawn
    with pipeline("text_generation", ours.llm) as generate:
        assert generate(PROMPT, max_new_tokens=NEW, do_sample=True, seed=3).token_ids[1:] == drawn
        assert generate(PROMPT, max_new_tokens=NEW, do_sample=True, seed=3, top_k=0).token_ids[1:] == every


class Favour(transformers.LogitsProcessor):
    """Favours tokens by the number of tokens so far."""

    def __call__(self, input_ids, scores):
        return scores.index_add(1, torch.tensor([input_ids.shape[1] % 50]), torch.full((len(scores), 1), 9.0))


def favour(input_ids, scores):
    scores[:, input_ids.shape[1] % 50] += 9.0
    return scores


def test_functions_of_the_caller_are_called_like_theirs(ours, theirs):
    def is_long(ids, scores):
        return torch.full((len(ids),), ids.shape[1] >= len(PROMPT) + 5)

    criteria = transformers.StoppingCriteriaList([is_long])
    processors = transformers.LogitsProcessorList([Favour()])
    options = {"max_new_tokens": NEW, "do_sample": False}
    expected = reference(
        theirs, PROMPT, logits_processor=processors, stopping_criteria=criteria, **options
    ).sequences.tolist()
    assert len(expected[0]) == len(PROMPT) + 5
    for own in (processors, favour, [favour]):
        stops = lambda ids, scores: ids.shape[1] >= len(PROMPT) + 5  # noqa: E731
        assert ours.generate(PROMPT, logits_processor=own, stopping_criteria=stops, **options) == expected
    beams = reference(
        theirs, PROMPT, logits_processor=processors, stopping_criteria=criteria, num_beams=3, **options
    ).sequences.tolist()
    tensors = ours.generate(
        torch.tensor([PROMPT]), logits_processor=processors, stopping_criteria=criteria, num_beams=3, **options
    )
    assert tensors.tolist() == beams
    seen = []

    def watch(ids, scores):
        seen.append((ids.shape, scores))
        return False

    ours.generate(PROMPT, 3, do_sample=False, stopping_criteria=watch)
    assert seen == [((1, len(PROMPT) + i), None) for i in (1, 2, 3)]


BEAMS = [
    {"num_beams": 4},
    {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 2.0, "no_repeat_ngram_size": 2},
    {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True, "ends": 1},
    {"num_beams": 4, "early_stopping": "never", "length_penalty": 0.5, "ends": 2, "repetition_penalty": 1.5},
    {"num_beams": 2, "num_return_sequences": 2, "length_penalty": -1.0, "ends": 2, "forced_eos_token_id": 5},
]


def check_beams(model, theirs, case):
    options = dict(case)
    ends = options.pop("ends", 0)
    if ends:
        options["eos_token_id"] = greedy_tokens(model)[2 : 2 + ends]
    for ids in (PROMPT, PROMPT[:5]):
        expected = reference(theirs, ids, max_new_tokens=NEW, do_sample=False, output_logits=True, **options)
        found = model.generate(
            torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, output_scores=True, output_logits=True,
            pad_token_id=1, **options,
        )  # fmt: skip
        width = expected.sequences.shape[1]
        assert found.sequences[:, :width].tolist() == expected.sequences.tolist(), options
        assert found.beam_indices.tolist() == expected.beam_indices.tolist()
        np.testing.assert_allclose(found.sequences_scores, expected.sequences_scores, rtol=1e-4, atol=1e-4)
        for name in ("scores", "logits"):
            rows, wanted = getattr(found, name), getattr(expected, name)
            assert len(rows) == len(wanted)
            np.testing.assert_allclose(torch.stack(rows), torch.stack(wanted), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("case", BEAMS, ids=str)
def test_beam_search_finds_what_transformers_finds(ours, theirs, case):
    check_beams(ours, theirs, case)
    ours.llm.engine.check_integrity()
    assert not ours.llm.engine.has_work


def test_beams_of_several_prompts_share_few_places(folder, ours):
    prompts = [PROMPT, PROMPT[:5], PROMPT[3:36]]
    options = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 5, "num_return_sequences": 2}
    apart = [ids for one in prompts for ids in ours.generate([one], **options)]
    assert ours.generate(prompts, **options) == apart
    with AutoModel.from_pretrained(folder, scheme="f32", kv_cache="f32", mode="eager", max_requests=3) as small:
        assert small.generate(prompts, **options) == apart  # pages are computed again, and beams wait for places
        small.llm.engine.check_integrity()


def test_padding_on_either_side_changes_nothing(ours, theirs):
    short = PROMPT[:7]
    pad = [0] * (len(PROMPT) - len(short))
    left = {"input_ids": torch.tensor([pad + short, PROMPT])}
    left["attention_mask"] = torch.tensor([[0] * len(pad) + [1] * len(short), [1] * len(PROMPT)])
    with torch.no_grad():
        expected = theirs.generate(**left, max_new_tokens=NEW, do_sample=False)
    assert ours.generate(**left, max_new_tokens=NEW, do_sample=False).tolist() == expected.tolist()
    right = {"input_ids": np.array([short + pad, PROMPT]), "attention_mask": left["attention_mask"].flip(1).numpy()}
    right["attention_mask"][1] = 1
    arrays = ours.generate(**right, max_new_tokens=NEW, do_sample=False, return_tensors="np")
    assert arrays.dtype == np.int64
    assert arrays[:, len(PROMPT) :].tolist() == expected[:, len(PROMPT) :].tolist()
    lists = ours.generate(**right, max_new_tokens=NEW, do_sample=False)
    assert lists[0] == short + arrays[0, len(PROMPT) :].tolist()


def test_padding_without_a_mask_is_that_of_transformers(ours, theirs):
    """The padding token is masked unless it ends answers, and an end token fills the rows without one."""
    end = greedy_tokens(ours)[1]
    rows = torch.tensor([[0] * 33 + PROMPT[:7], PROMPT])
    cases = [{"pad_token_id": 0}, {"pad_token_id": 0, "num_beams": 2}, {"pad_token_id": 5, "eos_token_id": [end, 3]}]
    for case in cases:
        with torch.no_grad():
            expected = theirs.generate(rows, max_new_tokens=NEW, do_sample=False, **case)
        assert ours.generate(inputs=rows, max_new_tokens=NEW, do_sample=False, **case).tolist() == expected.tolist()
    case = {"eos_token_id": [end, 3], "max_new_tokens": NEW, "do_sample": False}
    rows, own = torch.tensor([PROMPT, PROMPT[::-1]]), theirs.generation_config
    theirs.generation_config = transformers.GenerationConfig()
    assert ours.generate(rows, **case).tolist() == theirs.generate(rows, **case).tolist()
    theirs.generation_config = own
    with raises(InvalidArgumentError, param="input_ids"):
        ours.generate(max_new_tokens=3)


def test_suppressed_tokens_are_those_of_transformers(ours, theirs):
    plain = greedy_tokens(ours)
    rows = torch.tensor([PROMPT, PROMPT[::-1]])

    def allowed(row, ids):
        return [5, 6, 7, 8] if row % 2 else [*range(9 + int(ids.shape[0]) % 3, 20)]

    cases = [
        {"suppress_tokens": [plain[0], plain[3], 10**6]},
        {"begin_suppress_tokens": plain[:2]},
        {"begin_suppress_tokens": plain[:2], "num_beams": 2},
        {"prefix_allowed_tokens_fn": allowed, "forced_eos_token_id": 4},
        {"prefix_allowed_tokens_fn": allowed, "num_beams": 2, "num_return_sequences": 2, "suppress_tokens": [12]},
    ]
    for case in cases:
        options = {"max_new_tokens": NEW, "do_sample": False, **case}
        with torch.no_grad():
            expected = theirs.generate(rows, **options)
        assert ours.generate(rows, **options).tolist() == expected.tolist(), case
    for given in ({"forced_bos_token_id": 7}, {"generation_config": {"forced_bos_token_id": 7}}):
        options = {"max_new_tokens": 3, "do_sample": False, "begin_suppress_tokens": [7, 9], **given}
        assert ours.generate([[5]], **options)[0][1] == 7, given
    seen = []
    ours.generate(
        rows, 2, do_sample=True, num_return_sequences=2, prefix_allowed_tokens_fn=lambda row, _: seen.append(row) or [3]
    )
    assert sorted(seen) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_options_that_are_off_change_nothing(ours):
    off = {"num_beam_groups": 1, "diversity_penalty": 0.0, "renormalize_logits": False, "output_attentions": False,
           "synced_gpus": False, "guidance_scale": 1.0, "suppress_tokens": [], "sequence_bias": {},
           "prefix_allowed_tokens_fn": None, "bos_token_id": 0, "forced_eos_token_id": [7],
           "tokenizer": object()}  # fmt: skip
    expected = greedy_tokens(ours, forced_eos_token_id=7)
    assert greedy_tokens(ours, **off) == greedy_tokens(ours, generation_config=off) == expected
    for name, value in {
        "num_beam_groups": 2,
        "guidance_scale": 1.5,
        "sequence_bias": {(5,): 2.0},
        "synced_gpus": True,
        "cache_implementation": "quantized",
        "remove_invalid_values": True,
        "disable_compile": "yes",
    }.items():
        with raises(UnsupportedError, param=name):
            greedy_tokens(ours, **{name: value})


def test_options_without_effect_are_named_once_in_the_log(ours, caplog):
    generate_options._tell.cache_clear()
    expected = greedy_tokens(ours)
    without = {"cache_implementation": "static", "disable_compile": True, "tokenizer": object()}
    for _ in range(2):
        assert greedy_tokens(ours, **without) == expected
    config = transformers.GenerationConfig(cache_implementation="hybrid", disable_compile=True)
    assert greedy_tokens(ours, generation_config=config) == expected
    assert len(caplog.records) == 3
    assert all(name in record.getMessage() for name, record in zip(without, caplog.records, strict=True))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_beams": 0}, "num_beams"),
        ({"num_beams": 2, "do_sample": True}, "do_sample"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences"),
        ({"num_beams": 2, "early_stopping": "maybe"}, "early_stopping"),
        ({"num_beams": 2, "length_penalty": "x"}, "length_penalty"),
        ({"num_beams": 2, "stop_strings": "x"}, "stop_strings"),
        ({"logits_processor": 3}, "logits_processor"),
        ({"logits_processor": lambda ids, scores: scores[0]}, "logits_processor"),
        ({"logits_processor": lambda ids, scores: scores * np.nan}, "logits_processor"),
        ({"logits_processor": lambda ids, scores: 1 / 0}, "logits_processor"),
        ({"num_beams": 2, "logits_processor": lambda ids, scores: 1 / 0}, "logits_processor"),
        ({"stopping_criteria": lambda ids, scores: 1 / 0}, "stopping_criteria"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: []}, "prefix_allowed_tokens_fn"),
        ({"prefix_allowed_tokens_fn": 3}, "prefix_allowed_tokens_fn"),
        ({"suppress_tokens": "x"}, "suppress_tokens"),
        ({"return_tensors": "tf"}, "return_tensors"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ({"bad_words_ids": [[]]}, "bad_words_ids[0]"),
        ({"bad_words_ids": [[10**6]]}, "bad_words_ids"),
        ({"forced_eos_token_id": 10**6}, "forced_eos_token_id"),
    ],
)
def test_options_out_of_range_are_refused_by_name(ours, options, name):
    with pytest.raises(PenstockError) as caught:
        ours.generate([5], **{"max_new_tokens": 3, "do_sample": False, **options})
    assert caught.value.param == name
    assert isinstance(caught.value, (InvalidArgumentError, UnsupportedError))
    assert not ours.llm.engine.has_work


def test_options_of_a_batch_are_those_of_its_requests(ours):
    cases = [
        SamplingParams(max_tokens=NEW, temperature=0, no_repeat_ngram_size=2),
        SamplingParams(max_tokens=NEW, temperature=0, bad_words_ids=[[5], [6, 7]]),
        SamplingParams(max_tokens=NEW, temperature=0, forced_eos_token_id=3),
        SamplingParams(max_tokens=NEW, temperature=0),
        SamplingParams(max_tokens=NEW, temperature=0.9, seed=4, no_repeat_ngram_size=1),
    ]
    together = ours.llm.generate([PROMPT] * len(cases), cases)
    assert [one.token_ids for one in together] == [ours.llm.generate(PROMPT, one).token_ids for one in cases]
    assert together[2].token_ids[-1] == 3
    tokens = PROMPT + together[4].token_ids
    assert not set(together[4].token_ids) & set(PROMPT)
    assert len(set(together[4].token_ids)) == NEW == len(tokens) - len(PROMPT)
    with raises(InvalidArgumentError, param="num_return_sequences", match="num_beams"):
        ours.generate(PROMPT, num_beams=2, num_return_sequences=4, do_sample=False)
