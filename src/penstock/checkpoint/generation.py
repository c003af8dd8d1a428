"""Read the settings for generation from the files beside the weights: end tokens, sampling defaults, chat templates.

The functions take bytes, so that they serve the files of a folder and the segments of a bundle.  They do not render or
run anything.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from penstock.checkpoint.tokenizer_limits import check_json_size
from penstock.config import INFINITY, ConfigReader, is_number, parse_object, show
from penstock.errors import InvalidFileError

__all__ = [
    "ADDITIONAL_TEMPLATES",
    "SPECIAL_ROLES",
    "GenerationDefaults",
    "SampledDefaults",
    "TokenizerConfig",
    "clean_generation_config",
    "end_token_ids",
    "named_tokens",
    "read_chat_templates",
    "read_generation_config",
    "read_tokenizer_config",
]

_LOG: Final = logging.getLogger("penstock.generation")
_T = TypeVar("_T")

ADDITIONAL_TEMPLATES: Final = "additional_chat_templates.json"
"""The files of additional_chat_templates/ in one: an object with the templates by name.  Folders do not have it."""
MAX_TEMPLATE_CHARS: Final = 1 << 20
MAX_TEMPLATES: Final = 64
MAX_TOKENIZER_CONFIG_BYTES: Final = 64 << 20
MAX_EOS_TOKENS: Final = 64
MIN_SHARE: Final = 1e-6
MIN_REPETITION_PENALTY: Final = 0.01


@dataclass(frozen=True)
class SampledDefaults:
    """The sampling of generation_config.json, also of one without ``do_sample``, or else transformers' defaults."""

    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0


@dataclass(frozen=True)
class GenerationDefaults:
    """The checkpoint's defaults for generation; missing fields mean greedy generation without a limit.

    ``temperature`` 0 is greedy.  ``top_k`` 0, ``top_p`` 1, ``min_p`` 0, ``typical_p`` 1, ``repetition_penalty`` 1,
    ``no_repeat_ngram_size`` 0 and a forced token -1 are off.  A ``top_p`` or ``typical_p`` below 1e-6, which keeps only
    the likeliest token, is raised to 1e-6.  ``max_new_tokens`` None leaves the choice to the caller.  Any of
    ``eos_token_ids`` ends a text.  ``pad_token_id`` fills the shorter rows of a batch.  ``sampled``: the values of a
    call that samples whatever ``do_sample`` is here.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    do_sample: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    no_repeat_ngram_size: int = 0
    forced_bos_token_id: int = -1
    forced_eos_token_id: int = -1
    pad_token_id: int | None = None
    sampled: SampledDefaults = SampledDefaults()


def read_generation_config(files: Mapping[str, bytes | memoryview]) -> GenerationDefaults:
    """Read generation_config.json, and the end tokens of config.json if it has none.

    ``files`` maps file names to their bytes.  Raises InvalidFileError, which names the file and the key.
    """
    generation, config = _generation_reader(files), _reader(files, "config.json")
    reader = generation or ConfigReader({}, "generation_config.json")
    eos = end_token_ids(reader, config)
    if len(eos) > MAX_EOS_TOKENS:
        raise reader.error("eos_token_id", f"at most {MAX_EOS_TOKENS} tokens", list(eos))
    bos = _ids(reader, "bos_token_id") or _ids(config, "bos_token_id")
    uses_file = generation is not None and "generation_config.json" in files  # as in transformers
    pad = _Defaults(reader if uses_file else config).token("pad_token_id")
    return GenerationDefaults(
        eos_token_ids=eos,
        bos_token_id=next(iter(bos), None),
        pad_token_id=pad if pad >= 0 else None,
        **_sampling_defaults(_Defaults(reader)),
    )


def end_token_ids(generation: ConfigReader, config: ConfigReader) -> tuple[int, ...]:
    """Return the end tokens of generation_config.json, or those of config.json if it has none."""
    return _ids(generation, "eos_token_id") or _ids(config, "eos_token_id")


def _ids(reader: ConfigReader, key: str) -> tuple[int, ...]:
    """Return one token or several, each once; -1 is no token."""
    return tuple(dict.fromkeys(token for token in reader.int_or_list(key, min=-1) if token >= 0))


def clean_generation_config(data: bytes) -> bytes | None:
    """Return generation_config.json without the sampling defaults that cannot be used; None for a damaged file.

    Programs that read a bundle without this package, such as penstock-lite, rely on it.
    """
    name = "generation_config.json"
    reader = _generation_reader({name: data})
    if reader is None:
        return None
    defaults = _Defaults(reader)
    do_sample = _sampling_defaults(defaults)["do_sample"]
    if not defaults.unusable and reader.values.get("do_sample", do_sample) is do_sample:
        return data
    values = {key: value for key, value in reader.values.items() if key not in defaults.unusable}
    return (json.dumps(values | {"do_sample": do_sample}, indent=2) + "\n").encode()


def _sampling_defaults(defaults: _Defaults) -> dict[str, Any]:
    """Return the fields of GenerationDefaults that are not tokens."""
    do_sample = defaults.flag("do_sample")
    top_k = 0 if defaults.is_one_of("top_k", (0, -1)) else defaults.count("top_k") or 50
    typical_p = defaults.number("typical_p", 1.0, high=1.0)  # 0, which transformers refuses, is off
    values: dict[str, Any] = {
        "temperature": defaults.number("temperature", 1.0, high=1000.0),
        "top_k": top_k,
        "top_p": max(defaults.number("top_p", 1.0, high=1.0), MIN_SHARE),
        "min_p": defaults.number("min_p", 0.0, high=1.0),
        "typical_p": max(typical_p, MIN_SHARE) if typical_p else 1.0,
    }
    return {
        **(values if do_sample else {}),
        "do_sample": do_sample,
        "sampled": SampledDefaults(**values),
        "repetition_penalty": defaults.number("repetition_penalty", 1.0, low=MIN_REPETITION_PENALTY, high=100.0),
        "max_new_tokens": defaults.count("max_new_tokens", off=(0, -1)),
        "no_repeat_ngram_size": defaults.count("no_repeat_ngram_size", off=(0,)) or 0,
        "forced_bos_token_id": defaults.token("forced_bos_token_id"),
        "forced_eos_token_id": defaults.token("forced_eos_token_id"),
    }


def _reader(files: Mapping[str, bytes | memoryview], name: str) -> ConfigReader:
    return ConfigReader.parse(files[name], name) if name in files else ConfigReader({}, name)


def _generation_reader(files: Mapping[str, bytes | memoryview]) -> ConfigReader | None:
    """Return the values of generation_config.json; None for a damaged file, which is not used, as in transformers."""
    try:
        return _reader(files, "generation_config.json")
    except InvalidFileError as error:
        _LOG.warning("penstock: %s; the defaults for generation are not used", error)
        return None


class _Defaults:
    """The sampling defaults of generation_config.json.  One that says nothing, or cannot be used, is not used."""

    def __init__(self, reader: ConfigReader) -> None:
        self._reader = reader
        self.unusable: set[str] = set()

    def is_one_of(self, key: str, values: tuple[int, ...]) -> bool:
        """Return True if the value is one of ``values``."""
        return self._reader.values.get(key) in values

    def flag(self, key: str) -> bool:
        """Return true or false, which may be written as 1 or 0; false if the key is missing."""
        if type(value := self._reader.values.get(key)) is int and value in (0, 1):
            return bool(value)
        return bool(self._value(key, (), lambda: self._reader.bool(key, False)))

    def number(self, key: str, default: float, *, low: float = 0.0, high: float) -> float:
        """Return a number from ``low`` to ``high``."""
        value = self._value(key, (), lambda: self._reader.float(key, default, min=low, max=high))
        return default if value is None else value

    def count(self, key: str, off: tuple[int, ...] = ()) -> int | None:
        """Return a positive integer, which may be written as a float.  The values ``off`` mean None."""
        value = self._reader.values.get(key)
        if isinstance(value, float) and value.is_integer():
            self._reader.values[key] = int(value)
        return self._value(key, off, lambda: self._reader.optional_int(key))

    def token(self, key: str) -> int:
        """Return one token, which may be a list of one; -1 if the key is missing."""
        value = self._reader.values.get(key)
        if isinstance(value, list) and len(value) == 1:
            self._reader.values[key] = value[0]
        token = self._value(key, (-1,), lambda: self._reader.optional_int(key, min=0))
        return -1 if token is None else token

    def _value(self, key: str, off: tuple[int, ...], read: Callable[[], _T]) -> _T | None:
        if self._reader.values.get(key) in off:
            return None
        try:
            return read()
        except InvalidFileError as error:
            self.unusable.add(key)
            _LOG.warning("penstock: %s; the value is not used", error)
            return None


@dataclass(frozen=True)
class TokenizerConfig:
    """The part of tokenizer_config.json that generation needs.

    ``special_tokens``: the text of special tokens by role ("bos_token", "eos_token", "unk_token", "sep_token",
    "pad_token", "cls_token", "mask_token"), and of others by the names that the file gives them, such as "image_token".
    ``add_bos_token`` and ``add_eos_token``: None when the file has no such key; the post-processor of tokenizer.json
    then decides.  ``response_template``: the JSON of the model's description of its answers; "" without one.
    """

    special_tokens: dict[str, str] = field(default_factory=dict)
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    max_len: int | None = None
    padding_side: str = "right"
    response_template: str = ""


SPECIAL_ROLES: Final = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
"""The special tokens that every tokenizer may have, in the order of transformers."""
_MAX_TOKEN_CHARS: Final = 1024
_MAX_NAMED: Final = 1024


def read_tokenizer_config(files: Mapping[str, bytes | memoryview]) -> TokenizerConfig:
    """Read tokenizer_config.json; without the file all fields are empty.

    Raises InvalidFileError, which names the file and the key.
    """
    reader = _tokenizer_reader(files)
    return TokenizerConfig(
        special_tokens=_special_tokens(reader),
        add_bos_token=reader.bool("add_bos_token") if reader.has("add_bos_token") else None,
        add_eos_token=reader.bool("add_eos_token") if reader.has("add_eos_token") else None,
        max_len=_max_len(reader),
        padding_side="left" if reader.values.get("padding_side") == "left" else "right",
        response_template=json.dumps(template) if (template := reader.values.get("response_template")) else "",
    )


def _tokenizer_reader(files: Mapping[str, bytes | memoryview]) -> ConfigReader:
    name = "tokenizer_config.json"
    if name not in files:
        return ConfigReader({}, name)
    data = check_json_size(files[name], name, MAX_TOKENIZER_CONFIG_BYTES)
    return ConfigReader(parse_object(data, name, max_bytes=len(data), max_values=len(data), lenient=True), name)


def named_tokens(reader: ConfigReader) -> dict[str, tuple[str, object]]:
    """Return the special tokens of a file by role or name: the key that has each, for errors, and its value.

    They are the roles, the names that end in "_token", and the objects of names.
    """
    tokens: dict[str, tuple[str, object]] = {
        name: (name, value)
        for name, value in reader.values.items()
        if name in SPECIAL_ROLES or (name.endswith("_token") and isinstance(value, (str, dict)))
    }
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        section = reader.values.get(key)
        tokens |= {name: (key, value) for name, value in section.items()} if isinstance(section, dict) else {}
    if len(tokens) > _MAX_NAMED:
        raise reader.error("extra_special_tokens", f"at most {_MAX_NAMED} names", len(tokens))
    return tokens


def _special_tokens(reader: ConfigReader) -> dict[str, str]:
    """Return the text of each special token by its role or its name."""
    texts = {name: _token_text(reader, key, value) for name, (key, value) in named_tokens(reader).items()}
    return {name: text for name, text in texts.items() if text is not None}


def _token_text(reader: ConfigReader, key: str, value: object) -> str | None:
    """Return the text of a token, which is a string or an object with the string under "content"."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and (not isinstance(value, str) or len(value) > _MAX_TOKEN_CHARS):
        raise reader.error(key, f"a string of at most {_MAX_TOKEN_CHARS} characters", value)
    return value


def _max_len(reader: ConfigReader) -> int | None:
    """Return the limit on the length; None for no limit, for which transformers writes 1e30."""
    value: Any = reader.values.get("model_max_length")
    if value is None:
        return None
    if value == INFINITY or (is_number(value, -math.inf, math.inf) and not 1 <= value < 2**31):
        return None  # writers use -1, 0 and large numbers, too
    if not is_number(value, 1, 2**31):
        _LOG.warning("penstock: %s; the value is not used", reader.error("model_max_length", "a number", value))
        return None
    return int(value)


def read_chat_templates(files: Mapping[str, bytes | memoryview]) -> dict[str, str]:
    """Return the chat templates by name, as transformers finds them; empty if the checkpoint has none.

    chat_template.jinja is the template "default", and further files have names of their own.  If there is any such
    file, those of tokenizer_config.json are not used.  chat_template.json, which older processors wrote, counts when
    nothing else has a template.  Raises InvalidFileError for a damaged file.
    """
    named = _named_templates(_object(files, ADDITIONAL_TEMPLATES), ADDITIONAL_TEMPLATES)
    if "chat_template.jinja" in files:
        named = {"default": _decoded(files["chat_template.jinja"]), **named}
    if not named:
        reader = _tokenizer_reader(files)
        named = _named_templates(reader.values.get("chat_template"), f"{reader.file}: chat_template")
    if not named:
        old_file = "chat_template.json"
        named = _named_templates(_object(files, old_file).get("chat_template"), f"{old_file}: chat_template")
    return named


def _object(files: Mapping[str, bytes | memoryview], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    return parse_object(files[name], name, max_bytes=MAX_TOKENIZER_CONFIG_BYTES, lenient=True)


def _decoded(data: bytes | memoryview) -> str:
    try:
        text = bytes(data).decode()
    except UnicodeDecodeError as error:
        raise InvalidFileError(
            f"chat_template.jinja: expected UTF-8, got an invalid byte {error.start}", param="chat_template"
        ) from None
    return _limited(text, "chat_template.jinja")


def _named_templates(value: Any, where: str) -> dict[str, str]:
    """Return templates by name, from one string, a list of objects with "name" and "template", or one object."""
    if value is None:
        return {}
    entries: Any = value
    if isinstance(value, str):
        entries = {"default": value}
    elif isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        entries = {entry.get("name"): entry.get("template") for entry in value}  # of equal names the last one counts
    if not isinstance(entries, dict) or len(entries) > MAX_TEMPLATES:
        raise _wrong_template(where, value)
    for name, template in entries.items():
        if not isinstance(name, str) or not isinstance(template, (str, type(None))):
            raise _wrong_template(where, {"name": name, "template": template})
    return {name: _limited(text, f"{where}: {show(name)}") for name, text in entries.items() if text is not None}


def _wrong_template(where: str, value: Any) -> InvalidFileError:
    return InvalidFileError(
        f"{where}: expected a string, or at most {MAX_TEMPLATES} templates with names, got {show(value)}",
        param="chat_template",
    )


def _limited(template: str, where: str) -> str:
    if len(template) > MAX_TEMPLATE_CHARS:
        raise InvalidFileError(
            f"{where}: expected at most {MAX_TEMPLATE_CHARS} characters, got {len(template)}", param="chat_template"
        )
    return template
