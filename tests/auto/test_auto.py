"""The tutorial's shape, end to end on the demo model in eager and graph mode."""

from __future__ import annotations

import copy
import shutil

import numpy as np
import pytest
import transformers

import penstock
from penstock import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    GenerationConfig,
    InvalidArgumentError,
    PenstockError,
    TextStreamer,
    UnsupportedError,
)
from tests.support.command import DEMO, FOLDER
from tests.support.errors import raises


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
    with raises(InvalidArgumentError, param="config"):
        AutoModel.from_config(AutoConfig({"model_type": "llama"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": "yes"}, "do_sample"),
        ({"max_new_token": 3}, "max_new_tokens"),
        ({"max_new_tokens": 3, "max_tokens": 4}, "max_tokens .*twice"),
        ({"max_new_tokens": 3, "max_length": 4}, "max_new_tokens and max_length|max_length and max_new_tokens"),
        ({"max_length": 1}, "^max_length: .* 1 tokens"),
        ({"attention_mask": [1, 1]}, "^attention_mask: .*shape"),
        ({"generation_config": {"temprature": 1}}, "temprature.* temperature"),
        ({"generation_config": 3}, "^generation_config: .*GenerationConfig"),
        ({"use_cache": False}, "^use_cache .*True"),
        ({"output_scores": True, "best_of": 3}, "^best_of: "),
        ({"do_sample": True, "temperature": 0}, "temperature"),
        ({"num_beams": 4, "do_sample": True}, "num_beams"),
        ({"max_new_tokens": 0}, "max_tokens"),
    ],
)
def test_options_are_honoured_or_refused(model, options, message):
    with pytest.raises((InvalidArgumentError, UnsupportedError), match=message):
        model.generate([5], **options)


def test_a_temperature_of_greedy_answers_is_not_used(model):
    """As in transformers, with a warning unless it is the default there."""
    plain = model.generate([5], 4, do_sample=False, ignore_eos=True)
    assert model.generate([5], 4, do_sample=False, temperature=1.0, top_p=0.5, ignore_eos=True) == plain
    with pytest.warns(UserWarning, match="temperature"):
        assert model.generate([5], 4, do_sample=False, temperature=0.6, ignore_eos=True) == plain


def test_lengths_and_a_config_fill_what_a_call_leaves_open(model):
    prompt = AutoTokenizer.from_pretrained(DEMO)("import os\n")["input_ids"]
    plain = model.generate(prompt, max_new_tokens=6, do_sample=False, ignore_eos=True)
    assert model.generate(prompt, max_length=len(prompt) + 6, do_sample=False, ignore_eos=True) == plain
    config = GenerationConfig(max_length=len(prompt) + 6, do_sample=False, ignore_eos=True)
    assert model.generate(prompt, generation_config=config) == plain
    assert model.generate(prompt, generation_config=dict(config.options)) == plain
    assert len(model.generate(prompt, 2, generation_config=config)[0]) == len(prompt) + 2
    theirs = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=[4095])
    assert model.generate(prompt, generation_config=theirs) == plain
    end = plain[0][len(prompt) + 1]
    early = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=end)
    assert early[0] == plain[0][: len(prompt) + 2]
    late = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=end, min_length=len(prompt) + 4)
    assert len(late[0]) >= len(prompt) + 4


def test_padding_goes_in_and_out(model):
    short, long = [5, 6], [7, 8, 9, 10]
    inputs = {"input_ids": np.array([[0, 0, *short], long]), "attention_mask": np.array([[0, 0, 1, 1], [1] * 4])}
    padded = model.generate(**inputs, max_new_tokens=3, do_sample=False, ignore_eos=True, pad_token_id=1)
    apart = [model.generate(ids, 3, False, ignore_eos=True)[0] for ids in (short, long)]
    assert padded == [[*apart[0], 1, 1], apart[1]]


def test_several_answers_and_a_streamer(model, capsys):
    sequences = model.generate([5, 6], max_new_tokens=3, do_sample=True, num_return_sequences=3, seed=1)
    assert len(sequences) == 3
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    prompt = tokenizer("import os\n")["input_ids"]
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    ids = model.generate(prompt, max_new_tokens=5, do_sample=False, streamer=streamer)
    assert capsys.readouterr().out == tokenizer.decode(ids[0][len(prompt) :], skip_special_tokens=True) + "\n"
    with raises(UnsupportedError, param="skip_special_tokens"):
        TextStreamer(tokenizer, skip_special_tokens=False)


def test_scores_are_the_rows_that_tokens_were_chosen_from(model):
    flags = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    output = model.generate([[5, 6], [7]], max_new_tokens=4, do_sample=False, ignore_eos=True, **flags)
    assert output["sequences"] == output.sequences
    for ids, start, rows in zip(output.sequences, (2, 1), output.logits, strict=True):
        assert rows.shape == (4, 4096)
        assert rows.argmax(1).tolist() == ids[start:]
    assert (output.scores[0] == output.logits[0]).all()
    warm = model.generate([5, 6], max_new_tokens=2, temperature=0.5, top_k=0, top_p=1.0, seed=1, output_scores=True)
    again = model.llm.logits(warm.sequences[0][:-1])[1:] / np.float32(0.5)
    assert (warm.scores[0] == again).all()
    assert warm.logits is None
    plain = model.generate([5], max_new_tokens=2, return_dict_in_generate=True)
    assert (plain.scores, plain.logits) == (None, None)


YAML = """
seed: 0
use_parallel: {parallel}
load_checkpoint: {path}
runner: {{epochs: 2}}
model:
  arch: {{type: LlamaForCausalLM}}
  model_config:
    type: LlamaConfig
    seq_length: 64
    top_k: 3
    do_sample: False
    max_decode_length: 12
"""


def test_a_yaml_file_of_mindformers_opens_a_checkpoint(tmp_path):
    file = tmp_path / "predict_llama2_7b.yaml"
    file.write_text(YAML.format(path=DEMO, parallel="False"))
    with AutoModel.from_config(file) as model:
        assert model.llm.engine.max_len == 64
        assert len(model.generate([5, 6, 7], ignore_eos=True)[0]) == 12
        assert len(model.generate([5, 6, 7], max_new_tokens=2, ignore_eos=True)[0]) == 5
    ours = tmp_path / "run_demo.yaml"
    ours.write_text(f"infer:\n  prefill_model_path: {DEMO}\n  infer_seq_length: 32\n")
    with AutoModel.from_config(str(ours)) as model:
        assert model.llm.engine.max_len == 32
    for text, message in (
        (YAML.format(path=DEMO, parallel="1"), "use_parallel"),
        (YAML.format(path="llama2_7b.ckpt", parallel="False"), "a .ckpt file"),
        (YAML.format(path="none", parallel="False"), "none: "),
        ("model: {}\n", "load_checkpoint: "),
    ):
        file.write_text(text)
        with pytest.raises(PenstockError, match=message):
            AutoModel.from_config(file)
    with raises(InvalidArgumentError, param="config", match="AutoConfig"):
        AutoModel.from_config(3)


def test_a_tokenizer_has_what_tutorials_use(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "model")
    template = "{% for m in messages %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "hi;"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert tokenizer.decode(ids) == "hi;>"
    assert tokenizer.apply_chat_template(messages) == tokenizer.encode("hi;", add_special_tokens=False)
    arrays = tokenizer(["import os\n"], return_tensors="np")
    assert arrays["input_ids"].tolist() == [tokenizer.encode("import os\n")]
    texts = ["import os\n", "x"]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model", pad_token=tokenizer.eos_token)
    for side in ("left", "right"):
        tokenizer.padding_side = theirs.padding_side = side
        padded, expected = (one(texts, return_tensors="pt", padding=True) for one in (tokenizer, theirs))
        for name in ("input_ids", "attention_mask"):
            assert padded[name].tolist() == expected[name].tolist()
        assert tokenizer.batch_decode(padded["input_ids"]) == theirs.batch_decode(expected["input_ids"])
    assert tokenizer.decode(tokenizer.eos_token_id) == tokenizer.eos_token
    for call, message in (
        (lambda: tokenizer("x", return_tensors="tf"), "return_tensors"),
        (lambda: tokenizer("x", padding="max_length"), "padding"),
        (lambda: tokenizer(["x", "import os"], padding=True, padding_side="top"), "padding_side"),
        (lambda: tokenizer(["a", "import os"], return_tensors="np"), "equal length"),
        (lambda: AutoTokenizer.from_pretrained(3), "^model: "),
        (lambda: AutoConfig.from_pretrained(""), "^model: "),
        (lambda: AutoTokenizer(str(DEMO)), "^tokenizer: .*from_pretrained.* got str"),
        (lambda: AutoModel(str(DEMO)), "^llm: .*from_pretrained.* got str"),
        (lambda: penstock.pipeline(str(DEMO)), f"^model: .*'text_generation', '{DEMO}'"),
        (lambda: penstock.pipeline("text-generation"), "^model: .* got none"),
        (lambda: AutoTokenizer.from_pretrained(DEMO).apply_chat_template(messages), "no chat template"),
    ):
        with pytest.raises(PenstockError, match=message):
            call()


def test_missing_names_say_what_to_use(model):
    for name, message in (
        ("AutoModelForCausalLM", "Use AutoModel."),
        ("LLMm", "Use LLM."),
        ("Tensor", r"Use lite.Tensor\."),
        ("serve", "penstock serve"),
    ):
        with pytest.raises(AttributeError, match=message):
            getattr(penstock, name)
    assert penstock.lite.Model is not None
    assert not hasattr(penstock, "__wrapped__")
    with pytest.raises(AttributeError, match=r"Use penstock\.export"):
        model.save_pretrained("x")
    with pytest.raises(AttributeError, match="Use tokenizer"):
        model.llm.get_tokenizer()
    with pytest.raises(AttributeError, match=r"Tokenizer has no attribute 'apply_chat_template'\. Use LLM\.chat"):
        model.llm.tokenizer.apply_chat_template([])
    with pytest.raises(AttributeError, match="choices, text and token_ids"):
        _ = model.llm.generate("x", max_tokens=1).outputs
    assert copy.copy(model.llm.generate("x", max_tokens=1)).finish_reason == "length"


def test_tokenizers_accept_only_text_and_ids():
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    assert tokenizer.decode(5) == tokenizer.decode([5]) == tokenizer.decode(np.array([5]))
    for ids in ([-1], ["a"], [[5]], [True], 2**31):
        with raises(InvalidArgumentError, param="token_ids"):
            tokenizer.decode(ids)
    for text in (None, 5, ["a", None]):
        with raises(InvalidArgumentError, param="text"):
            tokenizer(text)
    with raises(InvalidArgumentError, param="path"):
        AutoTokenizer.from_pretrained(FOLDER / "tokenizer.json")


def test_sentencepiece_tokenizers_are_converted_or_refused(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x09\n\x05<unk>\x18\x02")  # Unigram
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
    for name in ("Trainer", "TrainingArguments"):
        with pytest.raises(AttributeError, match=r"training is not part of .*penstock\.export"):
            getattr(penstock, name)
