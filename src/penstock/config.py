"""Untrusted configuration files: a JSON parser with limits, and typed reads of an object.

``parse_json`` refuses duplicate keys, NaN, numbers that overflow and deep nesting; with ``lenient`` only the nesting.
``ConfigReader`` refuses every value of the wrong type or range.  Every error names the file and the key, what was
expected and what was found.
"""

from __future__ import annotations

import builtins
import json
import logging
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from itertools import chain, compress
from numbers import Integral, Real
from typing import Any, Final

from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError

__all__ = [
    "INFINITY", "OWN_NAMES", "QUANTIZED_FORMATS", "TOKEN_RULE", "ConfigReader", "RopeConfig", "check_choice",
    "check_flag", "check_integer", "check_number", "is_integer", "is_number", "is_token", "parse_json", "parse_object",
    "show", "show_tensors",
]  # fmt: skip

MAX_CONFIG_BYTES: Final = 16 << 20
MAX_DEPTH: Final = 64
MAX_VALUES: Final = 1 << 20
"""Limit on the values of a JSON text, counted by commas and brackets; parsing so many takes up to 0.5 s."""
MAX_INT: Final = 2**31 - 1
MAX_ROTARY_DIM: Final = 1024
MIN_TOKEN_CHARS: Final = 32
QUANTIZED_FORMATS: Final = ("gptq", "awq", "compressed-tensors", "fp8", "modelopt", "bitnet")
"""The values of quant_method of other tools whose weights ``penstock.checkpoint.quantized`` reads."""
OWN_NAMES: Final = "penstock_names"
"""The key of config.json that is true in a folder of floats whose tensors have the network's own names and forms."""
TOKEN_RULE: Final = (
    f"a token of at least {MIN_TOKEN_CHARS} printable ASCII characters without spaces. `openssl rand -hex 32` makes one"
)
INFINITY: Final = {"__float__": "Infinity"}
"""The form of an infinite number in a config.json of transformers 5; before, it wrote Infinity, which is not JSON.  The
values of -Infinity and NaN have the same form."""
_LOG: Final = logging.getLogger("penstock.config")
_SHOWN_CHARS = 80
_MAX_NAMED: Final = 5


class _Required:
    """The type of a sentinel: the key has no default."""


_REQUIRED: Final = _Required()


def show(value: object) -> str:
    """Return ``value`` as an error message shows it: printable ASCII, cut to a limited length."""
    if isinstance(value, dict):
        return f"an object with {len(value)} keys"
    if isinstance(value, list) and len(value) > 8:
        return f"a list of {len(value)} items"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = ascii(value if not isinstance(value, str) else value[:_SHOWN_CHARS])
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def show_tensors(names: list[str]) -> str:
    """Return the first names of several tensors, and how many more there are: "tensors 'a', 'b' and 7 more"."""
    shown = ", ".join(show(name) for name in names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {show(text)} does not fit a double")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {show(key)} appears twice")
            seen.add(key)
    return result


def _parse_int(text: str) -> int:
    return int(text)


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite_float
)


def _tag_constant(text: str) -> dict[str, str]:
    return {next(iter(INFINITY)): text}


def _tagged_float(text: str) -> float | dict[str, str]:
    value = float(text)
    return value if math.isfinite(value) else _tag_constant("Infinity" if value > 0 else "-Infinity")


def _lenient_decoder(file: str) -> json.JSONDecoder:
    """Return a decoder that takes what Python's takes; of a key that appears twice the last value counts."""

    def last_values(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            try:
                _unique_keys(pairs)
            except ValueError as error:
                _LOG.warning("penstock: %s: %s; the last value counts", file, error)
        return result

    return json.JSONDecoder(object_pairs_hook=last_values, parse_constant=_tag_constant, parse_float=_tagged_float)


_SHARING_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_unique_keys,
    parse_constant=_refuse_constant,
    parse_float=_finite_float,
    parse_int=_parse_int,  # a Python function: other threads may run between its calls
)
_LARGE: Final = 1 << 16
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


def _check_depth(value: Any, file: str) -> None:
    """Check the nesting depth, without recursion, and the many items of a vocabulary without a loop."""
    items = [value]
    for _ in range(MAX_DEPTH):
        nested = list(compress(items, map({dict, list}.__contains__, map(type, items))))
        if not nested:
            return
        items = list(chain.from_iterable([item.values() if type(item) is dict else item for item in nested]))
    if items:
        raise InvalidFileError(f"{file}: expected at most {MAX_DEPTH} levels of nesting, got more")


def _check_strings(value: Any, file: str) -> None:
    """Check that every string has a UTF-8 form."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidFileError(f"{file}: {show(error.object[error.start])} is half a surrogate pair") from None


def parse_json(
    data: bytes | memoryview,
    file: str,
    *,
    max_bytes: int = MAX_CONFIG_BYTES,
    max_values: int = MAX_VALUES,
    lets_threads_run: bool = False,
    lenient: bool = False,
) -> Any:
    """Return the value of a JSON text of at most ``max_bytes`` and ``max_values``; ``file`` names it in errors.

    With ``lets_threads_run`` other threads can run while a large text with many integers is parsed, which takes about
    twice as long.  With ``lenient`` the text is read as transformers reads it: the value of Infinity is the
    object ``INFINITY``, numbers that overflow a double are infinite, and the last of duplicate keys counts.

    Raises InvalidFileError for text that is not UTF-8 or not JSON, and for more than 64 levels of nesting; without
    ``lenient`` also for duplicate keys, NaN, infinity, and numbers that overflow a double.
    """
    if len(data) > max_bytes:
        raise InvalidFileError(f"{file}: expected at most {max_bytes} bytes of JSON, got {len(data)}")
    raw = bytes(data)
    num_values = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if num_values > max_values:
        raise InvalidFileError(f"{file}: expected at most {max_values} values, got about {num_values}")
    try:
        decoder = _SHARING_DECODER if lets_threads_run and len(raw) >= _LARGE else _DECODER
        value = (_lenient_decoder(file) if lenient else decoder).decode(raw.decode("utf-8"))
    except RecursionError:
        raise InvalidFileError(f"{file}: expected at most {MAX_DEPTH} levels of nesting, got more") from None
    except ValueError as error:  # includes UnicodeDecodeError and JSONDecodeError
        raise InvalidFileError(f"{file}: not valid JSON: {show(str(error))[1:-1]}") from None
    # A text with few brackets cannot nest too deep, and valid UTF-8 has surrogates only as escapes.
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH - 1:
        _check_depth(value, file)
    if _SURROGATE.search(raw):
        _check_strings(value, file)
    return value


def parse_object(
    data: bytes | memoryview,
    file: str,
    *,
    max_bytes: int = MAX_CONFIG_BYTES,
    max_values: int = MAX_VALUES,
    lenient: bool = False,
) -> dict[str, Any]:
    """Return the value of a JSON text that must be one object; other arguments and errors as ``parse_json``."""
    value = parse_json(data, file, max_bytes=max_bytes, max_values=max_values, lenient=lenient)
    if not isinstance(value, dict):
        raise InvalidFileError(f"{file}: expected an object, got {show(value)}")
    return value


@dataclass(frozen=True)
class RopeConfig:
    """The configuration of rotary positions, with transformers' field names.

    ``type`` is "default", "linear", "llama3", "yarn", "longrope" or "proportional".  ``rotary_dim`` is the number of
    leading dimensions of a head that rotate (even).  ``attention_factor`` scales cos and sin; it is 1.0 except for yarn
    and longrope.  ``divisors``: of longrope and proportional, for each pair of dimensions.  Fields that the type does
    not use keep their defaults.
    """

    theta: float
    type: str = "default"
    rotary_dim: int = 0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()


class ConfigReader:
    """Typed reads of one JSON object.

    The methods are named after the types that they read, so the annotations in this class name ``builtins``.

    ``file`` is the name in errors.  A read without a default refuses a missing key; null counts as missing.
    """

    def __init__(self, values: dict[str, Any], file: builtins.str = "config.json") -> None:
        self.values = values
        self.file = file

    @classmethod
    def parse(cls, data: bytes | memoryview, file: builtins.str = "config.json") -> ConfigReader:
        """Return a reader of the bytes of a JSON file; InvalidFileError when they are not one object.

        Every file of a checkpoint is read so: as leniently as transformers reads it (``lenient`` of ``parse_json``).
        """
        return cls(parse_object(data, file, lenient=True), file)

    def error(self, key: builtins.str, expected: builtins.str, actual: object) -> InvalidFileError:
        """Return the error to raise when the value of ``key`` is not as ``expected``."""
        key = key if key.isprintable() and len(key) <= _SHOWN_CHARS else show(key)[1:-1]  # a key of the file's own
        return InvalidFileError(f"{self.file}: {key}: expected {expected}, got {show(actual)}", param=key)

    def has(self, key: builtins.str) -> builtins.bool:
        """Return True if ``key`` exists and is not null."""
        return self.values.get(key) is not None

    def _get(self, key: builtins.str, default: object, expected: builtins.str) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if isinstance(default, _Required):
            if key in self.values:
                raise self.error(key, expected, None)
            raise InvalidFileError(f"{self.file}: {key}: expected {expected}, but the key is missing", param=key)
        return None

    def _read(
        self, key: builtins.str, default: Any, expected: builtins.str, accept: Callable[[Any], builtins.bool]
    ) -> Any:
        value = self._get(key, default, expected)
        if value is None:
            return default
        if not accept(value):
            raise self.error(key, expected, value)
        return value

    def int(
        self,
        key: builtins.str,
        default: builtins.int | _Required = _REQUIRED,
        *,
        min: builtins.int = 1,
        max: builtins.int = MAX_INT,
    ) -> builtins.int:
        """Return an integer in [min, max]; by default it must be positive."""
        result: builtins.int = self._read(key, default, f"an integer from {min} to {max}", _integer_in(min, max))
        return result

    def optional_int(
        self, key: builtins.str, *, min: builtins.int = 1, max: builtins.int = MAX_INT
    ) -> builtins.int | None:
        """Return an integer as ``int`` does; None when the key is missing or null."""
        result: builtins.int | None = self._read(key, None, f"an integer from {min} to {max}", _integer_in(min, max))
        return result

    def float(
        self,
        key: builtins.str,
        default: builtins.float | _Required = _REQUIRED,
        *,
        min: builtins.float = 0.0,
        max: builtins.float = 1e30,
    ) -> builtins.float:
        """Return a number in [min, max].  An integer is a number; true and false are not."""
        return builtins.float(self._read(key, default, f"a number from {min:g} to {max:g}", _number_in(min, max)))

    def optional_float(
        self, key: builtins.str, *, min: builtins.float = 0.0, max: builtins.float = 1e30
    ) -> builtins.float | None:
        """Return a number as ``float`` does; None when the key is missing or null."""
        value = self._read(key, None, f"a number from {min:g} to {max:g}", _number_in(min, max))
        return None if value is None else builtins.float(value)

    def bool(self, key: builtins.str, default: builtins.bool | _Required = _REQUIRED) -> builtins.bool:
        """Return true or false."""
        result: builtins.bool = self._read(
            key, default, "true or false", lambda value: isinstance(value, builtins.bool)
        )
        return result

    def str(
        self, key: builtins.str, default: builtins.str | _Required = _REQUIRED, *, max_len: builtins.int = 4096
    ) -> builtins.str:
        """Return a string of at most ``max_len`` characters."""
        result: builtins.str = self._read(key, default, f"a string of at most {max_len} characters", _text_of(max_len))
        return result

    def optional_str(self, key: builtins.str, *, max_len: builtins.int = 4096) -> builtins.str | None:
        """Return a string as ``str`` does; None when the key is missing or null."""
        result: builtins.str | None = self._read(
            key, None, f"a string of at most {max_len} characters", _text_of(max_len)
        )
        return result

    def one_of(
        self, key: builtins.str, choices: Iterable[builtins.str], default: builtins.str | _Required = _REQUIRED
    ) -> builtins.str:
        """Return one of ``choices``; UnsupportedError lists them for any other string."""
        choices = tuple(choices)
        value = self.str(key, default)
        if value not in choices:
            raise UnsupportedError(
                f"{self.file}: {key}: expected one of {', '.join(choices)}, got {show(value)}", param=key
            )
        return value

    def text_list(self, key: builtins.str, *, max_items: builtins.int = 100_000) -> list[builtins.str] | None:
        """Return a list of strings; None when the key is missing or null."""
        value = self._get(key, None, "a list of strings")
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) > max_items
            or not all(isinstance(item, builtins.str) for item in value)
        ):
            raise self.error(key, f"a list of at most {max_items} strings", value)
        return list(value)

    def int_or_list(
        self, key: builtins.str, *, min: builtins.int = 0, max: builtins.int = MAX_INT
    ) -> tuple[builtins.int, ...]:
        """Return one integer or a list of integers (such as eos_token_id) as a tuple; empty when missing or null."""
        value = self._get(key, None, "an integer or a list of integers")
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        accept = _integer_in(min, max)
        if len(items) > 1024 or not all(accept(item) for item in items):
            raise self.error(key, f"an integer from {min} to {max}, or a list of such integers", value)
        return tuple(items)

    def object(self, key: builtins.str) -> ConfigReader | None:
        """Return a reader of the object under ``key``; None when the key is missing or null."""
        value = self._get(key, None, "an object")
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "an object", value)
        return ConfigReader(value, f"{self.file}: {key}")

    def dtype(self) -> builtins.str:
        """Return the checkpoint's element type from ``dtype`` or ``torch_dtype``: "f32", "f16" or "bf16".

        Returns "" when neither key exists or its value is "auto"; the tensors then determine the type.
        """
        key = "dtype" if self.has("dtype") else "torch_dtype"
        value = self.str(key, "auto").removeprefix("torch.")
        dtypes = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float": "f32", "half": "f16", "auto": ""}
        if value not in dtypes:
            raise UnsupportedError(
                f"{self.file}: {key}: expected one of float32, float16, bfloat16, got {show(value)}", param=key
            )
        return dtypes[value]

    def quantization(self) -> ConfigReader | None:
        """Return the ``quantization_config`` of a folder that ``penstock quantize`` made; None for other checkpoints.

        Raises UnsupportedError, which names the alternative, for the quantization_config of another tool, except for
        MXFP4, whose values a network reads as floats (``has_mxfp4``), and for ``QUANTIZED_FORMATS``.
        """
        section = self.object("quantization_config")
        if section is None:
            return None
        method = section.str("quant_method", "")
        if method == "penstock":
            return section
        if method == "mxfp4" or method in QUANTIZED_FORMATS:
            return None
        raise UnsupportedError(
            f"{self.file}: quantization_config: quant_method {show(method)} is not supported. Use the original "
            "float32, float16 or bfloat16 checkpoint, and quantize it with --scheme w8a8 or w4a8, or a checkpoint "
            f"that is quantized as {', '.join(QUANTIZED_FORMATS)} or GGUF.",
            param="quantization_config",
        )

    def foreign_quantization(self) -> ConfigReader | None:
        """Return the ``quantization_config`` of a folder in one of ``QUANTIZED_FORMATS``; None for other folders."""
        section = self.object("quantization_config")
        return section if section is not None and section.str("quant_method", "") in QUANTIZED_FORMATS else None

    def has_mxfp4(self) -> builtins.bool:
        """Return True if ``quantization_config`` says that weights are stored in MXFP4."""
        section = self.object("quantization_config")
        return section is not None and section.str("quant_method", "") == "mxfp4"

    def rope(
        self, head_dim: builtins.int, *, theta: builtins.float = 10000.0, rotary_share: builtins.float = 1.0
    ) -> RopeConfig:
        """Return the rotary positions of heads of ``head_dim``; ``theta`` and ``rotary_share`` are defaults.

        Reads the old keys (rope_theta, rope_scaling) and the new one (rope_parameters).  Raises UnsupportedError for a
        rope type other than default, linear, llama3 and yarn.
        """
        section = _rope_section(self)
        theta = section.float("rope_theta", self.float("rope_theta", theta, min=1.0), min=1.0)
        type_key = "rope_type" if section.has("rope_type") else "type"
        rope_type = section.one_of(type_key, ("default", "linear", "llama3", "yarn"), "default")
        share = self.float("partial_rotary_factor", rotary_share, max=1.0)
        share = section.float("partial_rotary_factor", share, max=1.0)
        rotary_dim = builtins.int(head_dim * share)
        if not 2 <= rotary_dim <= MAX_ROTARY_DIM or rotary_dim % 2:
            raise self.error("head_dim", f"an even number of rotary dimensions, 2 to {MAX_ROTARY_DIM}", rotary_dim)
        base = RopeConfig(theta=theta, rotary_dim=rotary_dim)
        if rope_type == "linear":
            return replace(base, type=rope_type, factor=section.float("factor", min=1.0))
        if rope_type == "llama3":
            return _read_llama3(self, section, base)
        if rope_type == "yarn":
            return _read_yarn(self, section, base)
        return base


def is_integer(value: Any, low: int, high: int) -> bool:
    """Return True for an integer, Python's or numpy's, from ``low`` to ``high``; True and False are not integers."""
    is_int = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
    return is_int and low <= value <= high


def is_number(value: Any, low: float, high: float) -> bool:
    """Return True for a number, Python's or numpy's, from ``low`` to ``high``; True, False and NaN are not numbers."""
    is_real = type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))
    return is_real and low <= value <= high


def check_integer(name: str, value: Any, low: int, high: int) -> int:
    """Return an argument as an int.  InvalidArgumentError names one that is not an integer from ``low`` to ``high``."""
    if not is_integer(value, low, high):
        raise InvalidArgumentError(f"{name}: expected an integer from {low} to {high}, got {value!r:.100}", param=name)
    return int(value)


def check_number(name: str, value: Any, high: float, *, may_be_zero: bool = False) -> float:
    """Return an argument as a float.  InvalidArgumentError names one that is not a number from 0 to ``high``.

    0 is refused unless ``may_be_zero``.
    """
    if not is_number(value, 0, high) or not (value or may_be_zero):
        low = "from 0 to" if may_be_zero else "above 0 and up to"
        raise InvalidArgumentError(f"{name}: expected a number {low} {high:,.0f}, got {value!r:.100}", param=name)
    return float(value)


def is_token(value: object) -> bool:
    """Return True for a shared secret that cannot be guessed and fits into one line."""
    if not isinstance(value, str) or len(value) < MIN_TOKEN_CHARS:
        return False
    return value.isascii() and value.isprintable() and " " not in value


def check_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """Return an argument that must be one of ``choices``; InvalidArgumentError lists them for any other value."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgumentError(f"{name}: expected one of {', '.join(choices)}, got {value!r:.60}", param=name)
    return value


def check_flag(name: str, value: object) -> bool:
    """Return an argument that must be True or False; InvalidArgumentError names any other."""
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name}: expected True or False, got {value!r:.100}", param=name)
    return value


def _integer_in(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: is_integer(value, low, high)


def _number_in(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: is_number(value, low, high)


def _text_of(max_len: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and len(value) <= max_len


_ROPE_KEYS: Final = frozenset(field.name for field in fields(RopeConfig) if field.name != "divisors") | frozenset(
    ("rope_type", "rope_theta", "partial_rotary_factor", "mscale", "mscale_all_dim", "finetuned")
)


def _rope_section(reader: ConfigReader) -> ConfigReader:
    """Return the object that holds the scaling, empty when there is none.

    Objects per layer type are accepted only if they are equal.
    """
    key = "rope_scaling" if reader.has("rope_scaling") else "rope_parameters"
    section = reader.object(key) or ConfigReader({}, f"{reader.file}: {key}")
    nested = [value for value in section.values.values() if isinstance(value, dict)]
    if nested:
        if len(nested) != len(section.values) or any(value != nested[0] for value in nested):
            raise UnsupportedError(
                f"{section.file}: rotary positions that differ between layer types are not supported"
            )
        section = ConfigReader(nested[0], section.file)
    for name in section.values:
        if name not in _ROPE_KEYS:
            raise UnsupportedError(f"{section.file}: the key {show(name)} is not supported")
    return section


def _original_context(reader: ConfigReader, section: ConfigReader) -> int:
    name = "original_max_position_embeddings"
    outer = reader if reader.has(name) or not section.has(name) else section
    return outer.int(name if outer.has(name) else "max_position_embeddings")


def _read_llama3(reader: ConfigReader, section: ConfigReader, base: RopeConfig) -> RopeConfig:
    low, high = section.float("low_freq_factor", min=1e-6), section.float("high_freq_factor", min=1e-6)
    if high <= low:
        raise section.error("high_freq_factor", f"more than low_freq_factor ({low:g})", high)
    return replace(
        base,
        type="llama3",
        factor=section.float("factor", min=1.0),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_original_context(reader, section),
    )


def _read_yarn(reader: ConfigReader, section: ConfigReader, base: RopeConfig) -> RopeConfig:
    original = _original_context(reader, section)
    factor = section.optional_float("factor", min=1.0)
    if factor is None:
        factor = reader.int("max_position_embeddings") / original
    if base.theta <= 1.0:
        raise section.error("rope_theta", "more than 1", base.theta)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    attention_factor = section.optional_float("attention_factor")
    if attention_factor is None:
        scale, scale_all = section.optional_float("mscale"), section.optional_float("mscale_all_dim")
        attention_factor = magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1.0)
    return replace(
        base,
        type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        beta_fast=section.float("beta_fast", 32.0, min=1e-6, max=1e6),
        beta_slow=section.float("beta_slow", 1.0, min=1e-6, max=1e6),
        truncate=section.bool("truncate", True),
    )
