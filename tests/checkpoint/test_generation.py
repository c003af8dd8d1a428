"""Files beside the weights: end tokens, sampling defaults, special tokens, chat templates."""

from __future__ import annotations

import json

import pytest

from penstock.checkpoint.generation import (
    GenerationConfig,
    find_chat_template,
    read_generation_config,
    read_tokenizer_config,
)
from penstock.engine.params import ResolvedSampling
from penstock.errors import InvalidFileError
from tests.support.errors import raises


def files(**contents: object) -> dict[str, bytes]:
    return {f"{name}.json": json.dumps(value).encode() for name, value in contents.items()}


def test_several_end_tokens_and_sampling_defaults() -> None:
    generation = {"eos_token_id": [128001, 128008, 128009], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    config = read_generation_config(files(generation_config=generation, config={"eos_token_id": 2}))
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert (config.do_sample, config.temperature, config.top_k, config.top_p) == (True, 0.6, 50, 0.9)


def test_penalties_and_filters_of_the_model_are_defaults() -> None:
    generation = {"do_sample": True, "min_p": 0.05, "typical_p": None, "repetition_penalty": 1.05}
    config = read_generation_config(files(generation_config=generation))
    assert (config.min_p, config.typical_p, config.repetition_penalty) == (0.05, 1.0, 1.05)
    greedy = read_generation_config(files(generation_config=generation | {"do_sample": False, "typical_p": 0.5}))
    assert (greedy.min_p, greedy.typical_p, greedy.repetition_penalty) == (0.0, 1.0, 1.05)


@pytest.mark.parametrize("name", ["top_p", "typical_p"])
def test_a_tiny_top_p_keeps_only_the_likeliest_token(name: str) -> None:
    config = read_generation_config(files(generation_config={"do_sample": True, name: 1e-40}))
    assert getattr(ResolvedSampling(**{name: getattr(config, name)}), name) == 1e-6
    off = read_generation_config(files(generation_config={"do_sample": True, name: 0}))
    assert getattr(off, name) == 1.0


def test_end_tokens_fall_back_to_config() -> None:
    assert read_generation_config(files(config={"eos_token_id": 2, "bos_token_id": 1})).eos_token_ids == (2,)
    assert read_generation_config({}) == GenerationConfig()


def test_without_sampling_the_defaults_are_greedy() -> None:
    config = read_generation_config(files(generation_config={"temperature": 0.6, "top_k": 4}))
    assert (config.temperature, config.top_k) == (0.0, 0)


@pytest.mark.parametrize(
    "values", [{"eos_token_id": "x"}, {"eos_token_id": [1, True]}, {"temperature": -1}, {"top_p": 2}, {"top_k": 1.5},
               {"do_sample": 1}, {"eos_token_id": list(range(100))}, {"max_new_tokens": 0},
               {"repetition_penalty": 1e-40}]
)  # fmt: skip
def test_bad_generation_values_name_file_and_key(values: dict[str, object]) -> None:
    with pytest.raises(InvalidFileError, match=rf"^generation_config\.json: {next(iter(values))}: expected"):
        read_generation_config(files(generation_config=values))


def test_special_tokens_as_text_and_as_objects() -> None:
    config = read_tokenizer_config(
        files(tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True,
                                "model_max_length": 1e30})
    )  # fmt: skip
    assert config.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert config.add_bos_token is True
    assert config.max_len is None
    assert read_tokenizer_config({}).add_bos_token is None


def test_chat_template_file_comes_before_the_config() -> None:
    both = files(tokenizer_config={"chat_template": "old"}) | {"chat_template.jinja": "néw".encode()}
    assert find_chat_template(both) == "néw"
    assert find_chat_template(files(tokenizer_config={"chat_template": "old"})) == "old"
    assert find_chat_template({}) is None


def test_named_chat_templates() -> None:
    named = files(
        tokenizer_config={"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]}
    )
    assert find_chat_template(named) == "a"
    assert find_chat_template(named, "rag") == "b"
    with raises(InvalidFileError, param="chat_template", match="'x', found 'default', 'rag'"):
        find_chat_template(named, "x")


def test_a_template_of_no_text_or_endless_is_refused() -> None:
    with pytest.raises(InvalidFileError, match="expected UTF-8"):
        find_chat_template({"chat_template.jinja": b"\xff"})
    with pytest.raises(InvalidFileError, match="at most"):
        find_chat_template({"chat_template.jinja": b"x" * (1 << 21)})
    with pytest.raises(InvalidFileError, match="chat_template: expected a string"):
        find_chat_template(files(tokenizer_config={"chat_template": 7}))
