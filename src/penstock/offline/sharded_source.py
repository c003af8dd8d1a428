"""The checks of a sharded folder in a configuration file: its strategy, and the sizes of ``parallel_config``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.core.rank_layout import RankLayout
from penstock.errors import FileAccessError, InvalidFileError, PenstockError, UnsupportedError
from penstock.sharding.folder import STRATEGY, is_sharded
from penstock.sharding.strategy import Strategy

__all__ = ["check_sharded"]

_PARAM: Final = "src_strategy_path_or_dir"
_SIZES: Final = {
    "tensor_parallel_size": "model_parallel",
    "pipeline_parallel_size": "pipeline_stage",
    "context_parallel_size": "context_parallel",
}
_LOG: Final = logging.getLogger("penstock.offline")


def check_sharded(file: Path, checkpoint: Path, strategy: str | None, ranks: Mapping[str, int]) -> None:
    """Check that a checkpoint is cut as its configuration file says.

    ``strategy``: the path of a strategy, or of a folder with one, relative to ``file``.  ``ranks``: options of LLM;
    none runs the whole model in one process.  For a whole checkpoint a strategy is a line in the log.  Raises
    InvalidFileError, UnsupportedError or FileAccessError, which name the field.
    """
    is_cut = checkpoint.is_dir() and is_sharded(checkpoint)
    sent = None if strategy is None else _read(file, file.parent / strategy)
    if not is_cut:
        if sent is not None:
            _LOG.warning("%s: %s: not used, because %s has whole weights", file, _PARAM, checkpoint)
        return
    own = Strategy.read(checkpoint / STRATEGY) if (checkpoint / STRATEGY).exists() else None
    if own is None:
        return  # opening the folder says what it lacks
    if sent is not None and sent.checksum != own.checksum:
        raise InvalidFileError(
            f"{file}: {_PARAM}: expected the strategy that {checkpoint} is cut with ({own.layout}), got another "
            f"({sent.layout})",
            param=_PARAM,
        )
    layout = RankLayout(*(ranks.get(name, 1) for name in _SIZES))
    difference = own.layout.first_difference(layout)
    if ranks and difference is not None:
        name, expected, got = difference
        param = f"parallel_config.{_SIZES[name]}"
        raise InvalidFileError(
            f"{file}: {param}: expected {expected}, because {checkpoint} is cut for {own.layout}, got {got}; "
            "`penstock shard` cuts it in another way",
            param=param,
        )


def _read(file: Path, path: Path) -> Strategy:
    if path.is_dir():
        path = path / STRATEGY
    if path.suffix == ".ckpt" or (not path.exists() and any(path.parent.glob("*.ckpt"))):
        raise UnsupportedError(
            f"{file}: {_PARAM}: expected a strategy of `penstock plan`, got one of MindSpore, which cannot be read; "
            "MindFormers' transform_checkpoint.py merges the weights",
            param=_PARAM,
        )
    if not path.exists():
        raise FileAccessError(f"{file}: {_PARAM}: {path}: no such file", param=_PARAM)
    try:
        return Strategy.read(path)
    except PenstockError as error:
        raise InvalidFileError(f"{file}: {_PARAM}: {error}", param=_PARAM) from error
