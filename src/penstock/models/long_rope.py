"""Longrope: a short and a long table of divisors of the rotary frequencies, of which one serves all requests.

The reference chooses the table by the length of a text.  Here one table serves every request, because a request's
tokens must not depend on its final length.  The key ``planned_context_len`` of config.json chooses it: the long table
if it is more than original_max_position_embeddings.  Without the key it is the short table, and the context ends where
that does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from penstock.config import ConfigReader, is_number, show
from penstock.errors import UnsupportedError
from penstock.models.decoder import DecoderConfig

__all__ = ["read_with_longrope"]

_ROPE_KEYS: Final = ("rope_theta", "partial_rotary_factor")
_PLANNED: Final = "planned_context_len"
_ORIGINAL: Final = "original_max_position_embeddings"
_LONGROPE_KEYS: Final = (
    *_ROPE_KEYS, _ORIGINAL, "rope_type", "type", "factor", "attention_factor", "short_factor", "long_factor",
)  # fmt: skip


def read_with_longrope(
    reader: ConfigReader,
    read: Callable[[ConfigReader], DecoderConfig],
    *,
    names: Sequence[str] = ("longrope", "su"),
    original: int | None = None,
) -> DecoderConfig:
    """Return what ``read`` returns, with the table of longrope if the config has it; errors name the key.

    ``names``: the types that mean longrope in this family.  ``original``: the context of the short table when the
    config does not say it, by default the whole context.
    """
    key = "rope_scaling" if reader.has("rope_scaling") else "rope_parameters"
    section = reader.object(key)
    if section is None or section.values.get("rope_type", section.values.get("type")) not in names:
        return read(reader)
    kept = {name: section.values[name] for name in _ROPE_KEYS if name in section.values}
    config = read(ConfigReader(reader.values | {key: kept}, reader.file))
    return _with_table(section, config, reader, original or config.context_len)


def _with_table(section: ConfigReader, config: DecoderConfig, reader: ConfigReader, original: int) -> DecoderConfig:
    """Return the config with the table of longrope for the planned context, and with that context."""
    outer = section if section.has(_ORIGINAL) else reader
    original = outer.int(_ORIGINAL, original, min=2)
    planned = reader.int(_PLANNED, original, max=config.context_len)
    key = "long_factor" if planned > original else "short_factor"
    divisors, num_pairs = section.values.get(key), config.rope.rotary_dim // 2
    if (
        not isinstance(divisors, list)
        or len(divisors) != num_pairs
        or not all(is_number(value, 1e-6, 1e6) for value in divisors)
    ):
        raise section.error(key, f"a list of {num_pairs} numbers above 0", divisors)
    unknown = next((name for name in section.values if name not in _LONGROPE_KEYS), None)
    if unknown is not None:
        raise UnsupportedError(f"{section.file}: the key {show(unknown)} is not supported", param=unknown)
    factor = section.float("factor", config.context_len / original)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    rope = replace(
        config.rope,
        type="longrope",
        divisors=tuple(float(value) for value in divisors),
        attention_factor=section.float("attention_factor", default),
    )
    return replace(config, rope=rope, context_len=min(planned, config.context_len))
