"""Read the settings for generation from the files beside the weights: end tokens, sampling defaults, chat templates.

The functions take bytes, so that they serve the files of a folder and the segments of a bundle.  They do not render or
run anything.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.checkpoint.tokenizer_limits import check_json_size
from penstock.config import INFINITY, ConfigReader, is_number, parse_object, show
from penstock.errors import InvalidFileError

__all__ = [
    "SPECIAL_ROLES",
    "GenerationConfig",
    "TokenizerConfig",
    "end_token_ids",
    "find_chat_template",
    "read_generation_config",
    "read_tokenizer_config",
]

_LOG: Final = logging.getLogger("penstock.generation")
MAX_TEMPLATE_CHARS: Final = 1 << 20
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
    eos = end_token_ids(reader, config)
    if len(eos) > MAX_EOS_TOKENS:
        raise reader.error("eos_token_id", f"at most {MAX_EOS_TOKENS} tokens", list(eos))
    bos = _ids(reader, "bos_token_id") or _ids(config, "bos_token_id")
    do_sample = reader.bool("do_sample", False)
    temperature = reader.float("temperature", 1.0, max=1000.0)
    top_k = reader.int("top_k", 50, min=0)
    top_p = _share(reader.float("top_p", 1.0, max=1.0))
    typical_p = _share(reader.optional_float("typical_p", max=1.0))
    min_p = reader.optional_float("min_p", max=1.0) or 0.0
    repetition_penalty = reader.float("repetition_penalty", 1.0, min=MIN_REPETITION_PENALTY, max=100.0)
    return GenerationConfig(
        eos_token_ids=eos,
        bos_token_id=next(iter(bos), None),
        do_sample=do_sample,
        temperature=temperature if do_sample else 0.0,
        top_k=top_k if do_sample else 0,
        top_p=top_p if do_sample else 1.0,
        min_p=min_p if do_sample else 0.0,
        typical_p=typical_p if do_sample else 1.0,
        repetition_penalty=repetition_penalty,
        max_new_tokens=reader.optional_int("max_new_tokens"),
    )


def end_token_ids(generation: ConfigReader, config: ConfigReader) -> tuple[int, ...]:
    """Return the end tokens of generation_config.json, or those of config.json if it has none."""
    return _ids(generation, "eos_token_id") or _ids(config, "eos_token_id")


def _ids(reader: ConfigReader, key: str) -> tuple[int, ...]:
    """Return one token or several, each once; -1 is no token."""
    return tuple(dict.fromkeys(token for token in reader.int_or_list(key, min=-1) if token >= 0))


def _share(value: float | None) -> float:
    """Return the share of the probability to keep; 0 and None keep all of it."""
    return max(value, MIN_SHARE) if value else 1.0


def _reader(files: Mapping[str, bytes | memoryview], name: str) -> ConfigReader:
    return ConfigReader(parse_object(files[name], name) if name in files else {}, name)


@dataclass(frozen=True)
class TokenizerConfig:
    """The part of tokenizer_config.json that generation needs.

    ``special_tokens``: the text of special tokens by role ("bos_token", "eos_token", "unk_token", "sep_token",
    "pad_token", "cls_token", "mask_token"), and of others by the names that the file gives them, such as "image_token".
    ``add_bos_token`` and ``add_eos_token``: None when the file has no such key; the post-processor of tokenizer.json
    then decides.
    """

    special_tokens: dict[str, str] = field(default_factory=dict)
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    max_len: int | None = None
    chat_templates: dict[str, str] = field(default_factory=dict)


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
    name = "tokenizer_config.json"
    values = {}
    if name in files:
        data = check_json_size(files[name], name, MAX_TOKENIZER_CONFIG_BYTES)
        values = parse_object(data, name, max_bytes=len(data), max_values=len(data), tags_infinity=True)
    reader = ConfigReader(values, name)
    return TokenizerConfig(
        special_tokens=_special_tokens(reader),
        add_bos_token=reader.bool("add_bos_token") if reader.has("add_bos_token") else None,
        add_eos_token=reader.bool("add_eos_token") if reader.has("add_eos_token") else None,
        max_len=_max_len(reader),
        chat_templates=_templates(reader),
    )


def _special_tokens(reader: ConfigReader) -> dict[str, str]:
    """Return the text of each special token by its role or its name."""
    tokens = {}
    for name, value in reader.values.items():
        if name in SPECIAL_ROLES or (name.endswith("_token") and isinstance(value, (str, dict))):
            tokens[name] = _token_text(reader, name, value)
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        section = reader.values.get(key)
        if isinstance(section, dict):
            tokens |= {name: _token_text(reader, key, value) for name, value in section.items()}
    if len(tokens) > _MAX_NAMED:
        raise reader.error("extra_special_tokens", f"at most {_MAX_NAMED} names", len(tokens))
    return {name: text for name, text in tokens.items() if text is not None}


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


def _templates(reader: ConfigReader) -> dict[str, str]:
    """Return the templates by name, from one string or a list of objects with "name" and "template"."""
    value = reader.values.get("chat_template")
    if value is None:
        return {}
    entries = value if isinstance(value, list) else [{"name": "default", "template": value}]
    templates: dict[str, str] = {}
    for entry in entries[:65]:
        name = entry.get("name") if isinstance(entry, dict) else None
        template = entry.get("template") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not isinstance(template, str) or name in templates or len(templates) >= 64:
            raise reader.error("chat_template", "a string, or at most 64 objects with a name and a template", entry)
        templates[name] = _limited(template, f"{reader.file}: chat_template")
    return templates


def _limited(template: str, where: str) -> str:
    if len(template) > MAX_TEMPLATE_CHARS:
        raise InvalidFileError(f"{where}: expected at most {MAX_TEMPLATE_CHARS} characters, found {len(template)}")
    return template


def find_chat_template(files: Mapping[str, bytes | memoryview], name: str = "default") -> str | None:
    """Return the chat template called ``name``; None when the checkpoint has no template.

    The file chat_template.jinja has precedence over tokenizer_config.json.  Raises InvalidFileError for a damaged file,
    and when there are templates but none of that name.
    """
    if name == "default" and "chat_template.jinja" in files:
        try:
            text = bytes(files["chat_template.jinja"]).decode()
        except UnicodeDecodeError as error:
            raise InvalidFileError(
                f"chat_template.jinja: expected UTF-8, found an invalid byte {error.start}"
            ) from None
        return _limited(text, "chat_template.jinja")
    templates = read_tokenizer_config(files).chat_templates
    if not templates:
        return None
    if name not in templates:
        listed = ", ".join(show(known) for known in sorted(templates))
        raise InvalidFileError(
            f"tokenizer_config.json: chat_template: expected one named {show(name)}, found {listed}",
            param="chat_template",
        )
    return templates[name]
