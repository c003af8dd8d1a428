"""Read the settings for generation from the files beside the weights: end tokens, sampling defaults, chat templates.

The functions take bytes, so that they serve the files of a folder and the segments of a bundle.  They do not render or
run anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.checkpoint.tokenizer_limits import check_json_size
from penstock.config import ConfigReader, is_number, parse_object, show
from penstock.errors import InvalidFileError

__all__ = [
    "ADDITIONAL_TEMPLATES",
    "GenerationConfig",
    "TokenizerConfig",
    "read_chat_templates",
    "read_generation_config",
    "read_tokenizer_config",
]

ADDITIONAL_TEMPLATES: Final = "additional_chat_templates.json"
"""The files of additional_chat_templates/ in one: an object with the templates by name.  Folders do not have it."""
MAX_TEMPLATE_CHARS: Final = 1 << 20
MAX_TEMPLATES: Final = 64
MAX_TOKENIZER_CONFIG_BYTES: Final = 64 << 20
MAX_EOS_TOKENS: Final = 64
MIN_SHARE: Final = 1e-6
MIN_REPETITION_PENALTY: Final = 0.01


@dataclass(frozen=True)
class GenerationConfig:
    """The checkpoint's defaults for generation; missing fields mean greedy generation without a limit.

    ``temperature`` 0 is greedy.  ``top_k`` 0, ``top_p`` 1, ``min_p`` 0, ``typical_p`` 1 and ``repetition_penalty`` 1
    are off.  A ``top_p`` or ``typical_p`` below 1e-6, which keeps only the likeliest token, is raised to 1e-6.
    ``max_new_tokens`` None leaves the choice to the caller.  Any of ``eos_token_ids`` ends a text.
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


def read_generation_config(files: Mapping[str, bytes | memoryview]) -> GenerationConfig:
    """Read generation_config.json, and the end tokens of config.json if it has none.

    ``files`` maps file names to their bytes.  Raises InvalidFileError, which names the file and the key.
    """
    reader = _reader(files, "generation_config.json")
    config = _reader(files, "config.json")
    eos = reader.int_or_list("eos_token_id") or config.int_or_list("eos_token_id", min=-1)
    eos = tuple(dict.fromkeys(token for token in eos if token >= 0))
    if len(eos) > MAX_EOS_TOKENS:
        raise reader.error("eos_token_id", f"at most {MAX_EOS_TOKENS} tokens", list(eos))
    bos = reader.int_or_list("bos_token_id") or config.int_or_list("bos_token_id", min=-1)
    do_sample = reader.bool("do_sample", False)
    temperature = reader.float("temperature", 1.0, max=1000.0)
    top_k = reader.int("top_k", 50, min=0)
    top_p = _share(reader.float("top_p", 1.0, max=1.0))
    typical_p = _share(reader.optional_float("typical_p", max=1.0))
    min_p = reader.optional_float("min_p", max=1.0) or 0.0
    repetition_penalty = reader.float("repetition_penalty", 1.0, min=MIN_REPETITION_PENALTY, max=100.0)
    return GenerationConfig(
        eos_token_ids=eos,
        bos_token_id=next((token for token in bos if token >= 0), None),
        do_sample=do_sample,
        temperature=temperature if do_sample else 0.0,
        top_k=top_k if do_sample else 0,
        top_p=top_p if do_sample else 1.0,
        min_p=min_p if do_sample else 0.0,
        typical_p=typical_p if do_sample else 1.0,
        repetition_penalty=repetition_penalty,
        max_new_tokens=reader.optional_int("max_new_tokens"),
    )


def _share(value: float | None) -> float:
    """Return the share of the probability to keep; 0 and None keep all of it."""
    return max(value, MIN_SHARE) if value else 1.0


def _reader(files: Mapping[str, bytes | memoryview], name: str) -> ConfigReader:
    return ConfigReader(parse_object(files[name], name) if name in files else {}, name)


@dataclass(frozen=True)
class TokenizerConfig:
    """The part of tokenizer_config.json that generation needs.

    ``special_tokens``: the text of special tokens by role ("bos_token", "eos_token", "pad_token", "unk_token").
    ``add_bos_token`` and ``add_eos_token``: None when the file has no such key; the post-processor of tokenizer.json
    then decides.
    """

    special_tokens: dict[str, str] = field(default_factory=dict)
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    max_len: int | None = None


_ROLES: Final = ("bos_token", "eos_token", "pad_token", "unk_token")


def read_tokenizer_config(files: Mapping[str, bytes | memoryview]) -> TokenizerConfig:
    """Read tokenizer_config.json; without the file all fields are empty.

    Raises InvalidFileError, which names the file and the key.
    """
    reader = _tokenizer_reader(files)
    tokens = {}
    for role in _ROLES:
        text = _token_text(reader, role)
        if text is not None:
            tokens[role] = text
    return TokenizerConfig(
        special_tokens=tokens,
        add_bos_token=reader.bool("add_bos_token") if reader.has("add_bos_token") else None,
        add_eos_token=reader.bool("add_eos_token") if reader.has("add_eos_token") else None,
        max_len=_max_len(reader),
    )


def _tokenizer_reader(files: Mapping[str, bytes | memoryview]) -> ConfigReader:
    name = "tokenizer_config.json"
    if name not in files:
        return ConfigReader({}, name)
    data = check_json_size(files[name], name, MAX_TOKENIZER_CONFIG_BYTES)
    return ConfigReader(parse_object(data, name, max_bytes=len(data), max_values=len(data)), name)


def _token_text(reader: ConfigReader, role: str) -> str | None:
    """Return the text of a token, which is a string or an object with the string under "content"."""
    value = reader.values.get(role)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and (not isinstance(value, str) or len(value) > 1024):
        raise reader.error(role, "a string of at most 1024 characters", value)
    return value


def _max_len(reader: ConfigReader) -> int | None:
    """Return the limit on the length; None for no limit, for which transformers writes 1e30."""
    value: Any = reader.values.get("model_max_length")
    if value is None:
        return None
    if not is_number(value, 1, math.inf):
        raise reader.error("model_max_length", "a number of at least 1", value)
    return int(value) if value < 2**31 else None


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
    return parse_object(files[name], name, max_bytes=MAX_TOKENIZER_CONFIG_BYTES)


def _decoded(data: bytes | memoryview) -> str:
    try:
        text = bytes(data).decode()
    except UnicodeDecodeError as error:
        raise InvalidFileError(
            f"chat_template.jinja: expected UTF-8, found an invalid byte {error.start}", param="chat_template"
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
        f"{where}: expected a string, or at most {MAX_TEMPLATES} templates with names, found {show(value)}",
        param="chat_template",
    )


def _limited(template: str, where: str) -> str:
    if len(template) > MAX_TEMPLATE_CHARS:
        raise InvalidFileError(
            f"{where}: expected at most {MAX_TEMPLATE_CHARS} characters, found {len(template)}", param="chat_template"
        )
    return template
