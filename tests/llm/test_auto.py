"""The tutorial's shape, end to end on the demo model in eager and graph mode."""

from __future__ import annotations

import numpy as np
import pytest

import penstock
from penstock import AutoConfig, AutoModel, AutoTokenizer, InvalidArgumentError
from tests.support.command import DEMO, FOLDER


@pytest.fixture(scope="module")
def model():
    made = AutoModel.from_pretrained(DEMO)
    yield made
    made.close()


def test_the_tutorial_runs(model):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model_input = tokenizer("import os\n")["input_ids"]
    model_output = model.generate(model_input, max_new_tokens=12, do_sample=True, top_k=3)
    assert len(model_output) == 1
    assert model_output[0][: len(model_input)] == model_input
    assert 1 <= len(model_output[0]) - len(model_input) <= 12
    assert tokenizer.decode(model_output[0]).startswith("import os\n")


def test_several_prompts_give_several_lists(model):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    prompts = tokenizer(["import os\n", "def f(x):"])["input_ids"]
    together = model.generate(prompts, max_new_tokens=6, do_sample=False)
    assert together == [model.generate(p, max_new_tokens=6, do_sample=False)[0] for p in prompts]
    assert tokenizer.batch_decode(together)[1].startswith("def f(x):")


def test_a_config_remembers_its_weights():
    config = AutoConfig.from_pretrained(FOLDER)
    assert config.model_type == "llama"
    assert AutoConfig.from_pretrained(DEMO).hidden_size == 256
    with pytest.raises(AttributeError, match="hiden_size"):
        _ = config.hiden_size
    model = AutoModel.from_config(config, mode="eager")
    assert len(model.generate([5, 6], max_new_tokens=2)[0]) == 4
    model.close()
    with pytest.raises(InvalidArgumentError, match="no folder"):
        AutoModel.from_config(AutoConfig({"model_type": "llama"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": "yes"}, "do_sample"),
        ({"max_tokens": 3}, "max_new_tokens"),
        ({"do_sample": False, "temperature": 1.0}, "temperature"),
        ({"do_sample": True, "temperature": 0}, "temperature"),
        ({"num_beams": 4}, "num_beams"),
        ({"max_new_tokens": 0}, "max_tokens"),
    ],
)
def test_options_are_honoured_or_refused(model, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        model.generate([5], **options)


def test_tokenizers_accept_only_text_and_ids():
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    assert tokenizer.decode(5) == tokenizer.decode([5]) == tokenizer.decode(np.array([5]))
    for ids in ([-1], ["a"], [[5]], [True], 2**31):
        with pytest.raises(InvalidArgumentError, match="token_ids"):
            tokenizer.decode(ids)
    for text in (None, 5, ["a", None]):
        with pytest.raises(InvalidArgumentError, match="text: expected a string"):
            tokenizer(text)
    with pytest.raises(InvalidArgumentError, match="pass the folder"):
        AutoTokenizer.from_pretrained(FOLDER / "tokenizer.json")


def test_sentencepiece_tokenizers_are_converted_or_refused(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    convert = "penstock.checkpoint.tokenizer_convert.convert_tokenizer"
    monkeypatch.setattr(convert, lambda folder: (FOLDER / "tokenizer.json").read_bytes())
    assert AutoTokenizer.from_pretrained(tmp_path).encode("def f(") == AutoTokenizer.from_pretrained(FOLDER).encode(
        "def f("
    )


def test_tokenizers_agree_with_transformers():
    from transformers import AutoTokenizer as Reference

    ours, theirs = AutoTokenizer.from_pretrained(FOLDER), Reference.from_pretrained(FOLDER)
    for text in ("def f(x):\n    return é日🙂", "<|begin|>x<|end|>", "", "  a\t"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"])


def test_every_public_name_is_there():
    assert all(getattr(penstock, name) is not None for name in penstock.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Model'"):
        _ = penstock.Model
