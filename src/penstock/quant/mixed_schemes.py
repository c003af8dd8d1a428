"""Folders whose weights have several schemes: the table of them in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.config import ConfigReader, show
from penstock.errors import InvalidFileError
from penstock.quant.scheme import SCHEMES, Scheme, default_scheme, find_scheme

__all__ = [
    "HEADS", "HEAD_BLOCKS", "HEAD_NAME", "MIXED_VERSION", "TOKEN_TABLES", "block_tensors", "is_head", "mixed_config",
    "mixed_schemes", "named_scheme", "other_schemes",
]  # fmt: skip

HEAD_NAME: Final = "lm_head.weight"
HEADS: Final = (
    HEAD_NAME, "language_model.lm_head.weight", "embed_out.weight", "cls.predictions.decoder.weight",
    "lm_head.decoder.weight", "vocab_projector.weight", "decoder.weight",
)  # fmt: skip
"""The names that an output head has in folders."""
HEAD_BLOCKS: Final = "q6_k"
"""The scheme of blocks that an output head may have in a folder."""
TOKEN_TABLES: Final = ("embed_tokens", "shared")
MIXED_VERSION: Final = 3
"""The version of folders with several schemes.  Programs that know only version 2 refuse them."""
_STORED: Final = {"i8": 8, "u8": 4}
_FLOATS: Final = ("f32", "f16", "bf16")
_GROUPS: Final = "_groups"


def mixed_schemes(config: ConfigReader, dtypes: Mapping[str, str]) -> dict[str, str] | None:
    """Return the scheme of a linear with each of the tensors, by name; None if the folder has one scheme.

    ``dtypes``: the element types of the tensors.  A tensor that ``quantization_config.schemes`` does not name has the
    folder's scheme, or as int8 in a folder of 4 bits that of its head; a head (``is_head``) has it without rotation,
    and floats have their own type.  Names of other tensors are ignored: a rank has only some.  Raises InvalidFileError
    for a scheme that a tensor is not stored for.
    """
    section = config.quantization()
    if section is None or section.int("version", min=1) != MIXED_VERSION:
        return None
    base = find_scheme(section.one_of("scheme", [name for name, row in SCHEMES.items() if row.quantized]))
    table = section.object("schemes") or ConfigReader({}, section.file)
    schemes = {}
    for name, dtype in dtypes.items():
        if dtype not in (*_STORED, *_FLOATS) or name.endswith(_GROUPS):
            continue
        default = named_scheme(base, name, dtype)
        chosen = table.one_of(name, tuple(SCHEMES), default) if table.has(name) else default
        if not _can_have(find_scheme(chosen), dtype):
            raise InvalidFileError(
                f"{table.file}: {show(name)}: expected a scheme of {dtype.upper()} values, got {chosen}", param=name
            )
        schemes[name] = chosen
    return schemes


def block_tensors(section: ConfigReader) -> dict[str, str]:
    """Return the scheme of each tensor that is stored in blocks, by name, as ``schemes`` of quantization_config says.

    A rank may not have all of them.
    """
    table = section.object("schemes") if section.int("version", min=1) == MIXED_VERSION else None
    return {} if table is None else {name: HEAD_BLOCKS for name, own in table.values.items() if own == HEAD_BLOCKS}


def named_scheme(base: Scheme, name: str, dtype: str) -> str:
    """Return the scheme of a tensor of element type ``dtype`` in a folder of ``base``, as its name tells it."""
    if dtype in _FLOATS:
        return default_scheme(dtype)
    is_own = _STORED[dtype] == base.weight_bits and not is_head(name)
    return base.name if is_own else base.plain if _STORED[dtype] == base.weight_bits else base.head


def other_schemes(base: str, schemes: Mapping[str, str]) -> dict[str, str]:
    """Return those of the quantized tensors whose scheme a folder of ``base`` would not give them by their names.

    These are an output head under a name that ``is_head`` does not know, or in blocks.
    """
    row, stored = find_scheme(base), {bits: dtype for dtype, bits in _STORED.items()}
    return {
        name: scheme
        for name, scheme in schemes.items()
        if find_scheme(scheme).in_blocks or scheme != named_scheme(row, name, stored[find_scheme(scheme).weight_bits])
    }


def is_head(name: str) -> bool:
    """Return True for the weight of the output head, and for an embedding, which is quantized only if it is the head.

    Its columns are never rotated.  A folder's table names the heads under the other names of ``HEADS``: folders written
    before there was one have them rotated.
    """
    return name == HEAD_NAME or name.split(".")[-2:-1] in [[table] for table in TOKEN_TABLES]


def _can_have(scheme: Scheme, dtype: str) -> bool:
    """Return True if a tensor of an element type can have the scheme."""
    if dtype in _FLOATS:
        return scheme.name == dtype
    if scheme.in_blocks:
        return scheme.name == HEAD_BLOCKS and dtype == "u8"
    return scheme.quantized and scheme.weight_bits == _STORED[dtype]


def mixed_config(config: Mapping[str, Any], base: str, schemes: Mapping[str, str]) -> dict[str, Any]:
    """Return the config of a folder with several schemes, from that of a folder that is quantized as ``base``.

    ``schemes``: those of the tensors that differ from what a folder of ``base`` has.
    """
    section = dict(config["quantization_config"])
    section |= {"version": MIXED_VERSION, "scheme": base, "schemes": dict(sorted(schemes.items()))}
    return {**config, "quantization_config": section}
