"""Files beside the weights: end tokens, sampling defaults, special tokens, chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.generation import (
    ADDITIONAL_TEMPLATES,
    GenerationDefaults,
    SampledDefaults,
    clean_generation_config,
    read_chat_templates,
    read_generation_config,
    read_tokenizer_config,
)
from penstock.checkpoint.side_files import read_folder_files, write_side_files
from penstock.engine.params import ResolvedSampling
from penstock.errors import InvalidFileError
from penstock.sharding.folder import kept_files
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


@pytest.mark.parametrize(("name", "of_zero"), [("top_p", 1e-6), ("typical_p", 1.0)])
def test_a_tiny_top_p_keeps_only_the_likeliest_token(name: str, of_zero: float) -> None:
    config = read_generation_config(files(generation_config={"do_sample": True, name: 1e-40}))
    assert getattr(ResolvedSampling(**{name: getattr(config, name)}), name) == 1e-6
    zero = read_generation_config(files(generation_config={"do_sample": True, name: 0}))
    assert getattr(zero, name) == of_zero


def test_end_tokens_fall_back_to_config() -> None:
    assert read_generation_config(files(config={"eos_token_id": 2, "bos_token_id": 1})).eos_token_ids == (2,)
    assert read_generation_config({}) == GenerationDefaults()


def test_without_sampling_the_defaults_are_greedy() -> None:
    config = read_generation_config(files(generation_config={"temperature": 0.6, "top_k": 4}))
    assert (config.temperature, config.top_k) == (0.0, 0)
    assert config.sampled == SampledDefaults(temperature=0.6, top_k=4)  # of a call that samples


@pytest.mark.parametrize(
    "values", [{"eos_token_id": "x"}, {"eos_token_id": [1, True]}, {"eos_token_id": list(range(100))}]
)
def test_bad_generation_values_name_file_and_key(values: dict[str, object]) -> None:
    with raises(InvalidFileError, param=next(iter(values)), match=r"^generation_config\.json: "):
        read_generation_config(files(generation_config=values))


@pytest.mark.parametrize(
    ("values", "expected"),
    [({"top_k": -1}, {"top_k": 0}), ({"top_k": 0}, {"top_k": 0}), ({"top_k": 20.0}, {"top_k": 20}),
     ({"top_k": None}, {"top_k": 50}), ({"max_new_tokens": -1}, {}), ({"max_new_tokens": 0}, {}),
     ({"temperature": None, "top_p": None, "min_p": None, "repetition_penalty": None}, {}), ({"do_sample": 1}, {})],
)  # fmt: skip
def test_a_default_that_says_nothing_is_off(
    values: dict[str, object], expected: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = read_generation_config(files(generation_config={"do_sample": True} | values))
    sampled = SampledDefaults(**expected)
    assert config == GenerationDefaults(do_sample=True, temperature=1.0, top_k=sampled.top_k, sampled=sampled)
    assert not caplog.records
    data = json.dumps({"do_sample": True} | values).encode()
    assert clean_generation_config(data) == data or values == {"do_sample": 1}


@pytest.mark.parametrize(
    "values", [{"temperature": -1}, {"top_p": 2}, {"top_k": 1.5}, {"top_k": "many"}, {"do_sample": "yes"},
               {"repetition_penalty": 1e-40}, {"repetition_penalty": 0}, {"min_p": [0.1]}, {"typical_p": -1}]
)  # fmt: skip
def test_an_unusable_default_is_a_warning(values: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    """The model opens: a default is no more than what a request can set."""
    generation = {"do_sample": True} | values
    config = read_generation_config(files(generation_config=generation))
    plain = read_generation_config(files(generation_config={} if "do_sample" in values else {"do_sample": True}))
    assert config == plain
    assert [next(iter(values)) in record.getMessage() for record in caplog.records] == [True]
    clean = clean_generation_config(json.dumps(generation | {"eos_token_id": 7}).encode())
    assert clean is not None  # what a bundle gets, for programs that do not check
    assert json.loads(clean) == {"do_sample": "do_sample" not in values, "eos_token_id": 7}


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null"])
def test_a_damaged_generation_config_is_a_warning(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """As in transformers, which then takes the values of config.json."""
    config = read_generation_config({"generation_config.json": data} | files(config={"eos_token_id": 2}))
    assert config == GenerationDefaults(eos_token_ids=(2,))
    assert len(caplog.records) == 1
    assert clean_generation_config(data) is None


def test_the_padding_token_is_that_of_transformers() -> None:
    for generation, config, expected in (
        (b'{"pad_token_id": 9}', b'{"pad_token_id": 8}', 9),
        (b"{}", b'{"pad_token_id": 8}', None),
        (b"{", b'{"pad_token_id": 8}', 8),
        (b'{"pad_token_id": -1}', b"{}", None),
    ):
        found = read_generation_config({"generation_config.json": generation, "config.json": config})
        assert found.pad_token_id == expected
    assert read_generation_config({"config.json": b'{"pad_token_id": 8}'}).pad_token_id == 8


def test_every_reader_of_config_takes_infinity() -> None:
    text = b'{"eos_token_id": 7, "time_step_limit": [0.0, Infinity], "other": [-Infinity, NaN, 1e400], "a": 1, "a": 2}'
    assert read_generation_config({"config.json": text, "generation_config.json": text}).eos_token_ids == (7,)
    assert read_tokenizer_config({"tokenizer_config.json": text}).max_len is None


@pytest.mark.parametrize("written", ["-1", "0", "1e30", "Infinity", "1000000000000000019884624838656", '"long"'])
def test_a_length_that_is_no_limit(written: str) -> None:
    text = b'{"model_max_length": %s}' % written.encode()
    assert read_tokenizer_config({"tokenizer_config.json": text}).max_len is None


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
    config = {"chat_template": [{"name": "default", "template": "old"}, {"name": "rag", "template": "r"}]}
    named = files(tokenizer_config=config)
    assert read_chat_templates(named) == {"default": "old", "rag": "r"}
    assert read_chat_templates(named | {"chat_template.jinja": "néw".encode()}) == {"default": "néw"}
    further = {ADDITIONAL_TEMPLATES: b'{"tool_use": "t"}'}
    assert read_chat_templates(named | further) == {"tool_use": "t"}
    assert read_chat_templates(named | further | {"chat_template.jinja": b"j"}) == {"default": "j", "tool_use": "t"}
    assert read_chat_templates({}) == {}


def test_chat_templates_have_several_forms() -> None:
    for value in ("a", {"default": "a"}, [{"name": "default", "template": "a"}]):
        assert read_chat_templates(files(tokenizer_config={"chat_template": value})) == {"default": "a"}
    twice = [{"name": "default", "template": text} for text in "ab"]
    assert read_chat_templates(files(tokenizer_config={"chat_template": twice})) == {"default": "b"}
    for value in (None, [], {}, {"default": None}):
        old = {"chat_template.json": b'{"chat_template": "o"}'}
        assert read_chat_templates(files(tokenizer_config={"chat_template": value}) | old) == {"default": "o"}


def test_a_template_of_no_text_or_endless_is_refused() -> None:
    with raises(InvalidFileError, param="chat_template", match="expected UTF-8"):
        read_chat_templates({"chat_template.jinja": b"\xff"})
    with raises(InvalidFileError, param="chat_template", match="at most"):
        read_chat_templates({"chat_template.jinja": b"x" * (1 << 21)})
    for value in (7, ["a"], [{"name": 1, "template": "a"}], {"default": ["a"]}, {str(i): "x" for i in range(65)}):
        with raises(InvalidFileError, param="chat_template", match="chat_template: expected a string"):
            read_chat_templates(files(tokenizer_config={"chat_template": value}))


def test_a_folder_keeps_its_further_chat_templates(tmp_path: Path) -> None:
    home = tmp_path / "additional_chat_templates"
    home.mkdir()
    (home / "tool_use.jinja").write_text("t\n", newline="")
    (home / "rag 2.jinja").write_text("r")
    (home / ".hidden.jinja").write_text("h")
    (tmp_path / "chat_template.jinja").write_text("d")
    read = read_folder_files(tmp_path)
    templates = {"default": "d", "rag 2": "r", "tool_use": "t\n"}
    assert read_chat_templates(read) == templates
    (tmp_path / "copy").mkdir()
    write_side_files(tmp_path / "copy", read)
    assert read_chat_templates(read_folder_files(tmp_path / "copy")) == templates
    names = {path.name for path in (tmp_path / "copy").iterdir()}
    assert names == {"additional_chat_templates", "chat_template.jinja"}
    assert {f"additional_chat_templates/{name}.jinja" for name in ("tool_use", "rag 2")} < kept_files(tmp_path).keys()
    with pytest.raises(InvalidFileError, match=r"'\.\./x'"):
        write_side_files(tmp_path / "copy", {ADDITIONAL_TEMPLATES: b'{"../x": "y"}'})
