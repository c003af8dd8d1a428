"""Configuration files of MindSpore Lite: what each of their keys is here.

Their sections say how an Ascend or TensorRT backend compiles a graph.  Nothing is compiled when a bundle opens, so
most keys have become a property of the bundle or of every run.  Each key is a line in the log, and a value that would
compute something else is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final, NamedTuple

from penstock.errors import UnsupportedError

__all__ = ["SECTIONS", "tell_settings"]

_LOG: Final = logging.getLogger("penstock.lite")


class _Key(NamedTuple):
    """The meaning of a key here, and the values that agree with it; none: any value."""

    here: str
    values: tuple[str, ...] = ()


_KEPT_PRECISION: Final = ("must_keep_origin_dtype", "enforce_origin", "origin")
_PRECISION: Final = _Key("the scheme of the bundle, which is never changed", _KEPT_PRECISION)
_SHAPES: Final = _Key("not needed: prompts have any length; batch_size and context_len of [model] bound the memory")
_MEMORY: Final = _Key("memory is planned before the first step; context_len, batch_size and max_tokens of [model]")
_PASSES: Final = _Key("ops are fused when the bundle is made; `penstock inspect` shows the graph")
_DEVICE: Final = _Key("not needed: the target is cpu; device_id and rank_id of context.cpu choose cores and rank")
_CACHE: Final = _Key("a bundle is compiled already; that of a folder is kept in PENSTOCK_CACHE_DIR")
_OPS: Final = _Key("the ops that the bundle names; Context(ops=...) and --ops load your own")
_WEIGHTS: Final = _Key("weights are always mapped from the bundle, and equal ones of a ModelGroup are shared")
_RANKS: Final = _Key("not needed: the ranks meet through their launcher, such as penstock launch or mpirun")

SECTIONS: Final[Mapping[str, Mapping[str, _Key]]] = {
    "ascend_context": {
        "plugin_custom_ops": _OPS,
        "custom_opp_path": _OPS,
        "enable_custom_op": _OPS,
        "provider": _Key("the native core, the only backend"),
        "rank_table_file": _RANKS,
        "device_id": _DEVICE,
        "rank_id": _DEVICE,
        "precision_mode": _PRECISION,
        "input_shape": _SHAPES,
        "dynamic_dims": _SHAPES,
        "input_format": _SHAPES,
    },
    "ge_session_options": {
        "ge.externalWeight": _WEIGHTS,
        "ge.exec.atomicCleanPolicy": _MEMORY,
        "ge.exec.staticMemoryPolicy": _MEMORY,
        "ge.event": _Key("threads of the core wait for each other by barriers, which nothing sets"),
        "ge.exec.formatMode": _Key("weights lie in the bundle as the kernels read them"),
        "ge.exec.precision_mode": _PRECISION,
        "ge.exec.precisionMode": _PRECISION,
    },
    "ge_global_options": {},
    "ge_graph_options": {
        "ge.inputShape": _SHAPES,
        "ge.dynamicDims": _SHAPES,
        "ge.dynamicNodeType": _SHAPES,
    },
    "acl_build_options": {},
    "acl_init_options": {},
    "acl_option_cfg_param": {},
    "graph_kernel_param": {
        "opt_level": _PASSES,
        "enable_cce_lib": _PASSES,
        "disable_cce_lib_ops": _PASSES,
        "disable_cluster_ops": _PASSES,
        "enable_expand_ops": _PASSES,
    },
    "gpu_context": {"input_shape": _SHAPES, "dynamic_dims": _SHAPES, "opt_dims": _SHAPES},
    "ms_cache": {"serialize_path": _CACHE, "serialize_Path": _CACHE},
}
"""The sections, and their keys that have an answer of their own; another key is not used."""
_BY_KEY: Final = {key.lower(): answer for keys in SECTIONS.values() for key, answer in keys.items()}


def tell_settings(file: str, sections: Mapping[str, Mapping[str, str]]) -> None:
    """Log what each key in sections of MindSpore Lite is here.

    ``sections``: the texts by section and by key, in any case.  Raises UnsupportedError, which names the key, for a
    value that would compute something else.
    """
    for section, values in sections.items():
        for key, text in values.items():
            answer = _BY_KEY.get(key.lower())
            if answer is not None and answer.values and text.strip().lower() not in answer.values:
                raise UnsupportedError(
                    f"{file}: [{section}] {key}: expected {answer.values[0]}, because the precision is that of the "
                    f"bundle, got {text:.60}; remove the line, and choose with `penstock export --scheme` (for float32 "
                    "f32)",
                    param=key,
                )
            said = "not used" if answer is None else answer.here
            _LOG.warning("%s: [%s] %s: %s", file, section, key, said)
