"""Configuration reads: typed, bounded, and refused with file and key."""

from __future__ import annotations

import json
import math

import pytest

from penstock.config import INFINITY, ConfigReader, parse_json, parse_object
from penstock.errors import InvalidFileError, UnsupportedError
from tests.support.errors import raises


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[1]", b'{"a":1,"a":2}', b'{"a":NaN}', b'{"a":-Infinity}', b'{"a":1e400}', b"\xff\xfe",
     b'{"a":"\\ud800"}',
     b"[" * 100_000, b'{"a":' * 500 + b"1" + b"}" * 500, b'{"a":' + b"9" * 5000 + b"}", b'{"a":1} x', b"\xef\xbb\xbf{}",
     b'{"\\udfff":1}', b'{"a":"\x00"}'],
)  # fmt: skip
def test_hostile_json_is_an_invalid_file(text: bytes) -> None:
    with raises(InvalidFileError, match=r"^config\.json: "):
        parse_object(text, "config.json")


def test_an_infinite_number_is_read_as_transformers_5_writes_it() -> None:
    reader = ConfigReader.parse(b'{"a": [0.0, Infinity]}')
    assert reader.values == {"a": [0.0, INFINITY]}
    for text, name in ((b"-Infinity", "-Infinity"), (b"NaN", "NaN"), (b"1e400", "Infinity"), (b"-1e400", "-Infinity")):
        assert ConfigReader.parse(b'{"a": %s}' % text).values == {"a": {"__float__": name}}


def test_the_last_of_two_keys_counts_in_a_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    """As in transformers, with a warning."""
    assert ConfigReader.parse(b'{"a": 1, "b": 3, "a": 2}').values == {"a": 2, "b": 3}
    assert ["'a'" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("shell", [(b"[", b"]"), (b'{"a":', b"}")])
def test_json_nesting_is_limited(shell: tuple[bytes, bytes]) -> None:
    """Also where brackets stand beside each other, or in texts."""
    head, tail = shell
    for num, is_read in ((63, True), (64, False)):
        for text in (
            head * num + b"1" + tail * num,
            b'["[[[", [], {}, ' + head * (num - 1) + b"1" + tail * (num - 1) + b"]",
        ):
            if is_read:
                assert parse_json(text, "x") is not None
            else:
                with pytest.raises(InvalidFileError, match="64 levels"):
                    parse_json(text, "x")


def test_json_larger_than_its_limit_is_refused() -> None:
    with pytest.raises(InvalidFileError, match="10 bytes"):
        parse_json(b'"0123456789"', "x.json", max_bytes=10)


@pytest.mark.parametrize("value", [True, 1.0, "1", [1], {}, 0, -1, 2**31, 10**400, None])
def test_int_accepts_only_positive_integers(value: object) -> None:
    with raises(InvalidFileError, param="n", match=r"^config\.json: n: .* 1 to 2147483647, got "):
        ConfigReader({"n": value}).int("n")


@pytest.mark.parametrize("value", [True, "1", [], {}, -0.5, 1e31, 10**400])
def test_float_accepts_only_numbers_in_range(value: object) -> None:
    with raises(InvalidFileError, param="x"):
        ConfigReader({"x": value}).float("x")


def test_missing_and_null_take_the_default_or_are_refused() -> None:
    reader = ConfigReader({"null": None})
    assert reader.int("null", 7) == 7
    assert reader.int("gone", 7) == 7
    assert reader.optional_int("null") is None
    assert reader.float("gone", 2) == 2.0
    with raises(InvalidFileError, param="gone", match="missing"):
        reader.int("gone")
    with raises(InvalidFileError, param="null", match="got null"):
        reader.int("null")


def test_other_types_are_refused() -> None:
    reader = ConfigReader({"n": 1, "text": "x", "list": ["a", 1]})
    for read, key in ((reader.bool, "n"), (reader.str, "n"), (reader.object, "text"),
                      (reader.text_list, "list"), (reader.int_or_list, "list")):  # fmt: skip
        with raises(InvalidFileError, param=key, match="expected"):
            read(key)
    with raises(UnsupportedError, param="text", match="silu, gelu, got 'x'"):
        reader.one_of("text", ("silu", "gelu"))


def test_dtype_in_both_spellings() -> None:
    assert ConfigReader({"dtype": "float32", "torch_dtype": "float16"}).dtype() == "f32"
    assert ConfigReader({"torch_dtype": "torch.bfloat16"}).dtype() == "bf16"
    assert ConfigReader({}).dtype() == ""
    with raises(UnsupportedError, param="dtype", match="float32"):
        ConfigReader({"dtype": "float8_e4m3fn"}).dtype()


def test_foreign_quantization_is_refused_with_a_way_out() -> None:
    with raises(UnsupportedError, param="quantization_config", match="'bitsandbytes'.*quantized as gptq"):
        ConfigReader({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}).quantization()
    assert ConfigReader({"quantization_config": None}).quantization() is None


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


def test_rope_old_and_new_style_agree() -> None:
    old = ConfigReader({"rope_theta": 500000.0, "rope_scaling": LLAMA3, "max_position_embeddings": 131072})
    new = ConfigReader({"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}, "max_position_embeddings": 131072})
    assert old.rope(64) == new.rope(64)
    assert old.rope(64).type == "llama3"
    assert old.rope(64).original_max_position_embeddings == 8192
    assert ConfigReader({"rope_scaling": {"type": "linear", "factor": 2}}).rope(64).factor == 2.0
    assert ConfigReader({"rope_scaling": None}).rope(64).theta == 10000.0


def test_rope_yarn_attention_factor() -> None:
    section = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = ConfigReader({"rope_parameters": section | {"rope_theta": 1e6}}).rope(128)
    assert math.isclose(rope.attention_factor, 0.1 * math.log(4.0) + 1.0)
    section |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    assert ConfigReader({"rope_parameters": section}).rope(128).attention_factor == 1.0


def test_rope_per_layer_type_only_when_equal() -> None:
    same = {"rope_type": "default", "rope_theta": 1e4}
    assert (
        ConfigReader({"rope_parameters": {"full_attention": same, "sliding_attention": dict(same)}}).rope(64).theta
        == 1e4
    )
    other = {"full_attention": same, "sliding_attention": same | {"rope_theta": 1e6}}
    with pytest.raises(UnsupportedError, match="layer types"):
        ConfigReader({"rope_parameters": other}).rope(64)


@pytest.mark.parametrize(
    ("section", "param", "fact"),
    [
        ({"type": "dynamic", "factor": 2.0}, "type", "default, linear, llama3, yarn, got 'dynamic'"),
        ({"rope_type": "longrope"}, "rope_type", "'longrope'"),
        ({"rope_type": "linear"}, "factor", "missing"),
        ({"rope_type": "linear", "factor": 0.5}, "factor", " from 1 .*0.5"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor", "low_freq_factor"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, None, "'mrope_section'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.01}, "head_dim", "rotary dimensions"),
    ],
)
def test_rope_refusals_name_the_key(section: dict[str, object], param: str | None, fact: str) -> None:
    with raises((InvalidFileError, UnsupportedError), param=param, match=fact):
        ConfigReader({"rope_scaling": section}).rope(64)


def test_error_messages_stay_short_and_printable() -> None:
    for value in ("x" * 10_000, "\x1b[31m", ["y"] * 10_000, {"k": 1}, 10**4000):
        with pytest.raises(InvalidFileError) as caught:
            ConfigReader(json.loads(json.dumps({"n": value if value != 10**4000 else 0}))).int("n")
        assert len(str(caught.value)) < 200
        assert str(caught.value).isprintable()


def test_keys_of_the_file_are_shown_printable_and_short() -> None:
    for key in ("prompt\x1b[2J", "\u202eprompt", "p" * 10_000):
        with pytest.raises(InvalidFileError) as error:
            ConfigReader({key: 1}).str(key)
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 200
