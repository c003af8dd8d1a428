"""The configuration that a model is built with: a dictionary, or the section [model] of a file.

[model]
batch_size = 1
context_len = 2048
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from penstock.config import check_choice, check_flag, check_integer
from penstock.core.layouts import KV_LAYOUTS
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError
from penstock.lite.mindspore_settings import SECTIONS, tell_settings
from penstock.validation import refusal, wrong_type

__all__ = ["ModelConfig", "read_config", "read_values"]

_SECTION: Final = "model"
_MAX_FILE_BYTES: Final = 1 << 20
_BOUNDS: Final = {
    "batch_size": (1, 1 << 16),
    "seq_len": (1, 1 << 24),
    "context_len": (0, 1 << 24),
    "max_tokens": (1, 1 << 20),
    "rank_timeout_s": (1, 86_400),
    "join_timeout_s": (1, 86_400),
}


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of a model.

    ``batch_size``: the number of sequences of ``predict``; ``resize`` changes it.
    ``seq_len``: the number of tokens in a row of ``predict``; ``resize`` changes it.
    ``context_len``: the limit on the tokens of a sequence; 0 uses the model's limit.  Memory for keys and values is
    allocated when tokens come.
    ``max_tokens``: the limit on the tokens of one step, for which temporaries are planned.
    ``kv_cache``: "auto" (f32 under the scheme f32, else bf16), "f32", "bf16", "int8" or "int4".
    ``logits``: "last" returns one row per sequence, "all" one row per token.
    ``weights``: "mmap" shares the file's pages with other processes, "huge" copies them into private huge pages.
    ``verify``: check the checksums of the file, which reads it completely.
    ``transport``: of the bundle of a rank: "shared" (shared memory of one host) or "mpi" (several hosts).
    ``trusted_network``: needed by "mpi", which neither encrypts nor authenticates: only the ranks use the network.
    ``rank_timeout_s``: of the bundle of a rank: the seconds that a rank waits for another within ``predict``.
    ``join_timeout_s``: the same: the seconds that the ranks wait for each other in ``build_from_file``.
    """

    batch_size: int = 1
    seq_len: int = 1
    context_len: int = 0
    max_tokens: int = 512
    kv_cache: str = "auto"
    logits: str = "last"
    weights: str = "mmap"
    verify: bool = False
    transport: str = "shared"
    trusted_network: bool = False
    rank_timeout_s: int = 300
    join_timeout_s: int = 300

    def __post_init__(self) -> None:
        """Refuse a value that is out of range, by name."""
        for name, (low, high) in _BOUNDS.items():
            check_integer(name, getattr(self, name), low, high)
        for name, allowed in (
            ("kv_cache", KV_LAYOUTS), ("logits", ("last", "all")), ("weights", ("mmap", "huge")),
            ("transport", ("shared", "mpi")),
        ):  # fmt: skip
            check_choice(name, getattr(self, name), allowed)
        check_flag("verify", self.verify)
        check_flag("trusted_network", self.trusted_network)


def read_config(config: str | os.PathLike[str] | Mapping[str, Any] | ModelConfig | None) -> ModelConfig:
    """Return the ModelConfig of a dictionary or a file; "" and None give the defaults.

    Raises InvalidArgumentError or InvalidFileError, which name an unknown field or one that is out of range.
    """
    if config is None or config == "":
        return ModelConfig()
    if isinstance(config, ModelConfig):
        return config
    if isinstance(config, (str, os.PathLike)):
        return ModelConfig(**read_values(Path(config)))
    if not isinstance(config, Mapping):
        raise wrong_type("config", "a dictionary or a file name", config)
    known = [field.name for field in fields(ModelConfig)]
    for name in config:
        if name not in known:
            raise refusal("config", f"the fields {', '.join(known)}", name)
    return ModelConfig(**config)


def read_values(path: Path) -> dict[str, Any]:
    """Return the fields in a file.

    Sections of MindSpore Lite set none; ``tell_settings`` says what their keys are here, and what it raises.  Raises
    FileAccessError when it cannot be read, and InvalidFileError, which names the error, for invalid contents.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InvalidFileError(f"{path}: expected at most {_MAX_FILE_BYTES} bytes")
        text = path.read_text("utf-8")
    except OSError as error:
        raise FileAccessError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidFileError(f"{path}: invalid UTF-8 at byte {error.start}") from None
    parser = configparser.ConfigParser(interpolation=None, default_section="")
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # what is said of a key names it as the file does
    try:
        parser.read_string(text, source=path.name)
    except configparser.MissingSectionHeaderError as error:
        raise InvalidFileError(
            f"{path}: line {error.lineno}: expected a section first, such as [{_SECTION}] or [ascend_context], got "
            f"{error.line.strip():.60}"
        ) from None
    except configparser.Error as error:
        raise InvalidFileError(f"{path}: {' '.join(str(error).split())}") from None
    for section in parser.sections():
        names = [name.lower() for name in parser[section]]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InvalidFileError(f"{path}: [{section:.60}] {twice:.60}: expected one value, got two", param=twice)
    others = {section: dict(parser[section]) for section in parser.sections() if section != _SECTION}
    for section in others:
        if section not in SECTIONS:
            raise InvalidFileError(
                f"{path}: expected the section [{_SECTION}], or those of MindSpore Lite, got [{section:.60}]",
                param=section[:60],
            )
    tell_settings(str(path), others)
    texts = dict(parser[_SECTION]) if parser.has_section(_SECTION) else {}
    values = {name.lower(): _value(name.lower(), text) for name, text in texts.items()}
    try:
        read_config(values)
    except InvalidArgumentError as error:
        raise InvalidFileError(f"{path}: {error}") from None
    return values


def _value(name: str, text: str) -> Any:
    """Return a string of the file as the type of its field, or unchanged if it is invalid, which the field refuses."""
    kind = {field.name: type(field.default) for field in fields(ModelConfig)}.get(name, str)
    if kind is int and text.isascii() and text.isdecimal() and len(text) < 12:
        return int(text)
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    return text
