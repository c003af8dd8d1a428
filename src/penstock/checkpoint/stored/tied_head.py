"""An output head that is stored beside the embedding that config.json ties it to, or in its place.

transformers 5 ties the two only if their values are equal; otherwise both count.  If only one is stored, it is both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any, Final

from penstock.config import ConfigReader
from penstock.quant.mixed_schemes import HEADS

__all__ = ["HEADS", "find_tied", "has_only_head", "may_untie", "with_stored_head"]

_LOG: Final = logging.getLogger("penstock.head")
_KEYS: Final = ("tie_word_embeddings", "tie_embedding")
_EMBEDDINGS: Final = (
    "shared.weight", "embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight",
    "embed_in.weight", "backbone.embeddings.weight",
)  # fmt: skip


def find_tied(names: Collection[str]) -> tuple[str, str] | None:
    """Return the names of the embedding and of the output head; None unless both are stored."""
    head = next((name for name in HEADS if name in names), None)
    embedding = _find_embedding(names)
    return None if head is None or embedding is None else (embedding, head)


def has_only_head(names: Collection[str]) -> bool:
    """Return True if an output head is stored, and no embedding."""
    return any(name in names for name in HEADS) and _find_embedding(names) is None


def may_untie(names: Collection[str]) -> bool:
    """Return False for a network with a ``shared`` embedding: whether it scales its rows follows from the key."""
    return _EMBEDDINGS[0] not in names


def _find_embedding(names: Collection[str]) -> str | None:
    for end in _EMBEDDINGS:
        embedding = next((name for name in names if name.endswith(end)), None)
        if embedding is not None:
            return embedding
    return None


def with_stored_head(config: ConfigReader, differs: Callable[[], bool]) -> ConfigReader:
    """Return the configuration, in which nothing is tied if ``differs()``: the folder has another output head."""
    if config.values.get(_KEYS[0]) is False or not differs():
        return config
    if config.values.get(_KEYS[0]) is True:
        _LOG.warning(
            "penstock: %s: tie_word_embeddings is true, but the stored output head differs from the embedding; the "
            "stored head is used",
            config.file,
        )
    values: dict[str, Any] = {**config.values, _KEYS[0]: False}
    if _KEYS[1] in values:
        values[_KEYS[1]] = False
    if isinstance(values.get("text_config"), dict):
        values["text_config"] = {**values["text_config"], _KEYS[0]: False}
    return ConfigReader(values, config.file)
