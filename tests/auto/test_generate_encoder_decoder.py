"""``generate`` of an encoder-decoder against transformers: options count the tokens of the decoder only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from penstock import AutoModel

NEW = 10
CONFIG = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 1, "num_heads": 2,
    "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**CONFIG)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    model.generation_config = transformers.GenerationConfig(decoder_start_token_id=0, pad_token_id=0)
    return model


@pytest.fixture(scope="module")
def ours(theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    theirs.save_pretrained(folder)
    with AutoModel.from_pretrained(folder, scheme="f32", kv_cache="f32", mode="eager", max_requests=4) as model:
        yield model


def favour(input_ids, scores):
    """Favour a token by the number of tokens so far, and by their sum."""
    scores[:, (7 * input_ids.shape[1] + int(input_ids.sum())) % 60] += 2.0
    return scores


def test_options_count_the_tokens_of_the_decoder(ours, theirs):
    encoder = [*np.random.default_rng(3).integers(2, 64, 40).tolist(), 1]

    def answer(model_options, own_options=None):
        options = {"do_sample": False, **model_options}
        with torch.no_grad():
            whole = theirs.generate(
                torch.tensor([encoder]), output_scores=True, return_dict_in_generate=True, **options
            )
        expected = whole.sequences[0].tolist()
        for more in ({}, {"output_scores": True}):
            found = ours.generate([encoder], ignore_eos=True, **options | more)
            assert (found.sequences if more else found)[0] == expected, (options, more)
        return expected[1:], whole, found

    plain, _, _ = answer({"max_new_tokens": NEW})
    cases = [
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 2, "repetition_penalty": 1.4},
        {"forced_bos_token_id": 9},
        {"forced_bos_token_id": 9, "forced_eos_token_id": 5},
        {"bad_words_ids": [[encoder[-1], plain[0]], [0, plain[0]], [plain[1]]]},
        {"max_new_tokens": None, "max_length": 6},
        {"logits_processor": [favour]},
        {"num_beams": 3, "no_repeat_ngram_size": 2, "repetition_penalty": 1.4},
        {"num_beams": 3, "logits_processor": [favour], "forced_bos_token_id": 9},
    ]
    seen = set()
    for case in cases:
        expected, whole, found = answer({"max_new_tokens": NEW} | case)
        seen.add(tuple(expected))
        if "num_beams" not in case:
            np.testing.assert_allclose(found.scores[0], torch.cat(whole.scores).numpy(), rtol=1e-3, atol=1e-3)
    assert len(seen) > 5


def test_padding_of_the_encoder_is_no_beginning_of_the_decoder(ours):
    """The padding token of T5 is the one that its decoder begins with."""
    rows = np.array([[5, 6, 1, 0, 0], [5, 6, 7, 8, 1]])
    found = ours.generate(rows, 3, do_sample=False, ignore_eos=True, return_tensors="np")
    assert found.tolist() == ours.generate([[5, 6, 1], [5, 6, 7, 8, 1]], 3, do_sample=False, ignore_eos=True)


class Recorder:
    """A streamer that keeps what it gets."""

    def __init__(self):
        self.ids = []

    def put(self, value):
        self.ids += np.asarray(value).ravel().tolist()

    def end(self):
        self.ids.append("end")


def test_sequences_and_streams_are_those_of_the_decoder(ours, theirs):
    """Also with tokens of the decoder behind those of the encoder, which are ``decoder_input_ids`` there."""
    rows = [[5, 6, 7, 8, 1], [9, 6, 7, 5, 1]]
    with torch.no_grad():
        whole = theirs.generate(torch.tensor(rows), max_new_tokens=4, do_sample=False).tolist()
        begun = torch.tensor([[0, 7]])
        longer = theirs.generate(torch.tensor(rows[:1]), decoder_input_ids=begun, max_new_tokens=4, do_sample=False)
    options = {"do_sample": False, "ignore_eos": True}
    assert ours.generate(rows, 4, **options) == whole
    assert ours.generate(torch.tensor(rows), 4, **options).tolist() == whole
    assert ours.generate([[*rows[0], 0, 7]], 4, **options) == longer.tolist()
    for more in ({}, {"stopping_criteria": lambda ids, scores: False}):
        recorder = Recorder()
        assert ours.generate(rows[0], 4, streamer=recorder, **options, **more) == whole[:1]
        assert recorder.ids == [*whole[0], "end"]


def test_stopping_criteria_see_the_tokens_of_the_decoder(ours):
    seen = []
    ours.generate(
        [[5, 6, 1]], 3, do_sample=False, ignore_eos=True, stopping_criteria=lambda ids, _: seen.append(ids) or False
    )
    assert [ids[0].tolist() for ids in seen] == [[0, *seen[-1][0, 1 : 2 + index].tolist()] for index in range(3)]
