"""The windows of families in which windowed layers and full ones alternate."""

from __future__ import annotations

from penstock.config import ConfigReader
from penstock.models.decoder import read_num_layers

__all__ = ["read_layer_windows"]


def read_layer_windows(reader: ConfigReader, *, window: int, period: int) -> tuple[int, ...]:
    """Return the window of each layer in positions; 0 attends to every position.

    Reads layer_types, or else sliding_window_pattern, the number of layers of which the last is full.  ``window`` and
    ``period`` are the family's defaults.  Errors name the key.
    """
    num_layers = read_num_layers(reader)
    if "sliding_window" in reader.values and not reader.has("sliding_window"):
        raise reader.error("sliding_window", "an integer", None)
    window = reader.int("sliding_window", window)
    kinds = reader.text_list("layer_types")
    if kinds is None:
        period = reader.int("sliding_window_pattern", period)
        return tuple(0 if (layer + 1) % period == 0 else window for layer in range(num_layers))
    if len(kinds) != num_layers:
        raise reader.error("layer_types", f"one entry for each of {num_layers} layers", len(kinds))
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise reader.error("layer_types", "full_attention or sliding_attention", kind)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
