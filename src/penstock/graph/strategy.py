"""Make the sharding strategy of a checkpoint: the rows that ``passes.shard`` gives each rank, by tensor name.

It needs neither PyTorch nor a capture.  A test compares it with the pass for every family and world.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from penstock.checkpoint.folder import HEAD_NAME
from penstock.checkpoint.tensor_file import TensorInfo
from penstock.config import ConfigReader, check_integer, show
from penstock.core.comm import MAX_RANKS
from penstock.errors import InvalidFileError, UnsupportedError
from penstock.graph.passes.cut import Cut, cut_evenly, cut_heads
from penstock.models.families import built_in_families
from penstock.sharding.strategy import Parameter, RowRanges, Strategy, config_checksum

__all__ = ["make_strategy"]

_POSITIONS = ("wpe", "embed_positions", "position_embeddings")
"""Tables that are not read by token ids; each rank has them whole."""
_FAMILIES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
"""Families whose cuts follow from the names of their tensors."""
_UNREAD = ".rotary_emb.inv_freq"


class Tensors(Protocol):
    """The source of a strategy: a ``Checkpoint``, or a folder that ``penstock.sharding.source`` opens."""

    @property
    def config(self) -> ConfigReader:
        """The reader of config.json."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The type and shape of each tensor."""

    def redundant_names(self) -> set[str]:
        """Return the names of tensors that no network reads."""


def make_strategy(model: Tensors, world: int) -> Strategy:
    """Return the strategy of a model for ``world`` ranks.  An output head that equals its embedding is stored once.

    Raises InvalidArgumentError (``tensor_parallel_size``) for more ranks than attention heads, and InvalidFileError,
    which names a tensor whose rows are not those of config.json's heads; UnsupportedError (``model_type``) for a family
    whose tensors are not cut yet.
    """
    check_integer("tensor_parallel_size", world, 1, MAX_RANKS)
    _check_family(model.config)
    config, tensors, redundant = model.config, model.tensors, model.redundant_names()
    cuts = _Cuts(config, world)
    embedding = next((name for name in tensors if name.endswith("embed_tokens.weight")), "")
    parameters = {}
    for name, info in tensors.items():
        if name in redundant and name == HEAD_NAME and embedding:
            parameters[name] = Parameter(info.dtype, info.shape, "same", name=embedding)
        elif name in redundant or name.endswith(_UNREAD):
            parameters[name] = Parameter(info.dtype, info.shape, "owner")
        else:
            ranges = cuts.ranges_of(name, info, tensors)
            cut = "replicated" if ranges is None else "rows"
            parameters[name] = Parameter(info.dtype, info.shape, cut, ranges=ranges or ())
    return Strategy(config.str("model_type", ""), config_checksum(config), world, parameters)


def _check_family(config: ConfigReader) -> None:
    """Refuse a family whose parameters are not the checkpoint's tensors; a user's network is cut by its names."""
    family = config.str("model_type", "")
    if family in built_in_families() and family not in _FAMILIES:
        raise UnsupportedError(
            f"{config.file}: model_type: expected one of {', '.join(_FAMILIES)} to cut a checkpoint folder for ranks, "
            f"found {show(family)}; cut its bundle with penstock export --tp",
            param="model_type",
        )


class _Cuts:
    """The rows of each rank, by the name of a layer."""

    def __init__(self, config: ConfigReader, world: int) -> None:
        self._config, self._world = config, world
        self._rules: dict[str, Callable[[str, int], tuple[RowRanges, ...] | None]] = {
            "q_proj": self._queries,
            "k_proj": self._keys,
            "v_proj": self._keys,
            "qkv_proj": self._stacked,
            "query_key_value": self._interleaved,
            "gate_up_proj": self._gate_up,
        }

    def ranges_of(self, name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> tuple[RowRanges, ...] | None:
        """Return the rows of each rank; None if each has the whole tensor.  A bias or scale is cut like its weight."""
        module, _, _ = name.rpartition(".")
        weight = tensors.get(f"{module}.weight")
        layer = module.rpartition(".")[2]
        if weight is None or len(weight.shape) != 2 or layer in _POSITIONS or not info.shape:
            return None
        if info.shape[0] != weight.shape[0]:
            return None
        return self._rules.get(layer, self._even)(name, info.shape[0])

    def _even(self, name: str, num_rows: int) -> tuple[RowRanges, ...] | None:
        cut = cut_evenly(num_rows, self._world)
        return None if cut is None else _single(cut)

    def _heads(self, name: str, num_rows: int, parts: Callable[[int, int], int]) -> tuple[Cut, Cut, int, int]:
        """Return the cuts of query and key rows, the head size, and the number of query heads.

        ``parts(heads, kv_heads)``: how many heads ``num_rows`` are.
        """
        num_heads = self._config.int("num_attention_heads")
        num_kv_heads = self._config.int("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads or num_rows % parts(num_heads, num_kv_heads):
            raise InvalidFileError(
                f"tensor {show(name)}: expected rows for {num_heads} attention heads and {num_kv_heads} key-value "
                f"heads, found {num_rows}"
            )
        head_dim = num_rows // parts(num_heads, num_kv_heads)
        heads, kv_heads = cut_heads(num_heads, num_kv_heads, self._world)
        return heads.times(head_dim), kv_heads.times(head_dim), head_dim, num_heads

    def _queries(self, name: str, num_rows: int) -> tuple[RowRanges, ...]:
        return _single(self._heads(name, num_rows, lambda heads, _: heads)[0])

    def _keys(self, name: str, num_rows: int) -> tuple[RowRanges, ...]:
        return _single(self._heads(name, num_rows, lambda _, kv_heads: kv_heads)[1])

    def _stacked(self, name: str, num_rows: int) -> tuple[RowRanges, ...]:
        """Rows of all queries, then of all keys, then of all values."""
        queries, keys, head_dim, num_heads = self._heads(name, num_rows, lambda heads, kv_heads: heads + 2 * kv_heads)
        key_start = num_heads * head_dim
        value_start = key_start + (num_rows - key_start) // 2
        return tuple(
            _joined((q, _shift(k, key_start), _shift(k, value_start)))
            for q, k in zip(queries.ranges, keys.ranges, strict=True)
        )

    def _interleaved(self, name: str, num_rows: int) -> tuple[RowRanges, ...]:
        """Return, for each key-value head, the rows of its queries, its key and its value."""
        queries, keys, head_dim, num_heads = self._heads(name, num_rows, lambda heads, kv_heads: heads + 2 * kv_heads)
        num_kv_heads = self._config.int("num_key_value_heads", num_heads)
        group = num_heads // num_kv_heads * head_dim
        result = []
        for (q_start, q_stop), (k_start, k_stop) in zip(queries.ranges, keys.ranges, strict=True):
            rows = []
            for head in range(k_start // head_dim, k_stop // head_dim):
                extra = 2 * head * head_dim  # the keys and values of the heads before
                first, last = max(q_start, head * group), min(q_stop, (head + 1) * group)
                end = (head + 1) * group + extra
                rows += [(first + extra, last + extra), (end, end + 2 * head_dim)]
            result.append(_joined(tuple(rows)))
        return tuple(result)

    def _gate_up(self, name: str, num_rows: int) -> tuple[RowRanges, ...] | None:
        """Rows of gate, then of up."""
        if num_rows % 2:
            raise InvalidFileError(f"tensor {show(name)}: expected an even number of rows, found {num_rows}")
        cut = cut_evenly(num_rows // 2, self._world)
        if cut is None:
            return None
        return tuple(_joined((rows, _shift(rows, num_rows // 2))) for rows in cut.ranges)


def _single(cut: Cut) -> tuple[RowRanges, ...]:
    return tuple((rows,) for rows in cut.ranges)


def _shift(rows: tuple[int, int], offset: int) -> tuple[int, int]:
    return rows[0] + offset, rows[1] + offset


def _joined(rows: RowRanges) -> RowRanges:
    """Return the ranges with neighbours put together."""
    result: list[tuple[int, int]] = []
    for start, stop in rows:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result)
