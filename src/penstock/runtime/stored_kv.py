"""The type of keys and values that "auto" means for a model whose folder says it (``PTQConfig.kvcache_dtype``)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from penstock.config import ConfigReader
from penstock.core import native
from penstock.core.layouts import KV_LAYOUTS, kv_layout_of
from penstock.runtime.program import ProgramLimits

__all__ = ["kv_layout_in", "stored_kv_layout", "with_stored_kv"]

_KEY = "kv_cache"


def stored_kv_layout(config: bytes | memoryview | None) -> str | None:
    """Return ``quantization_config.kv_cache`` of a config.json; None if it has none.

    Raises UnsupportedError for a type that does not exist, and InvalidFileError for a value of another kind.
    """
    if config is None or f'"{_KEY}"'.encode() not in bytes(config):
        return None
    section = ConfigReader.parse(config).object("quantization_config")
    if section is None or section.values.get("quant_method") != "penstock" or not section.has(_KEY):
        return None
    layout = section.one_of(_KEY, KV_LAYOUTS)
    return None if layout == "auto" else layout


def kv_layout_in(kv_layout: str, model: native.Model) -> str:
    """Return the type that ``kv_layout`` means for an open bundle: for "auto" its own, or that of its scheme."""
    if kv_layout == "auto":
        kv_layout = stored_kv_layout(model.segment("config.json")) or kv_layout
    return kv_layout_of(kv_layout, model.info.scheme)


def with_stored_kv(limits: ProgramLimits, bundle: Path | str) -> ProgramLimits:
    """Return the limits with the type that "auto" means for a bundle whose parts are planned without its files."""
    if limits.kv_layout != "auto":
        return limits
    with native.Model.open(bundle) as model:
        layout = stored_kv_layout(model.segment("config.json"))
    return limits if layout is None else dataclasses.replace(limits, kv_layout=layout)
