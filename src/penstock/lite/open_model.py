"""An open bundle: the file, the settings that it was opened with, and the context that its programs run on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from penstock.core import native as core
from penstock.core.metadata import check_same
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.lite.affinity import BoundContext, chosen_cores
from penstock.lite.device import Context, check_target
from penstock.lite.settings import ModelConfig, read_config

__all__ = ["ModelType", "OpenModel"]


class ModelType(Enum):
    """What a file is."""

    PENSTOCK = "penstock"
    """A bundle, ``.psm``."""


class OpenModel:
    """A bundle that is open, and the context that its programs run on."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        model_type: ModelType,
        context: Context | None,
        config: str | os.PathLike[str] | Mapping[str, Any] | ModelConfig | None,
    ) -> None:
        if not isinstance(model_type, ModelType):
            raise InvalidArgumentError(f"model_type: expected ModelType.PENSTOCK, found {model_type!r:.60}")
        if not isinstance(path, (str, os.PathLike)) or not str(path):
            raise InvalidArgumentError(f"model_path: expected the name of a bundle, found {path!r:.60}")
        if context is not None and not isinstance(context, Context):
            raise InvalidArgumentError(f"context: expected a Context, found {type(context).__name__}")
        self.context = context or Context()
        check_target(self.context.target)
        self.config = read_config(config)
        self.path = Path(path)
        self._cores = chosen_cores(self.context.cpu)
        self._bound: BoundContext | None = None
        self.is_private = False
        self.shared_bytes = 0
        """Bytes of weights that are mapped from the file of another model of the group."""
        self.native = core.Model.open(self.path, verify=self.config.verify)
        self.info = self.native.info
        self._stamp = self.native.stamp  # of what is computed from first, whatever is opened beside it later
        try:
            self._check_precision()
            if self.config.weights == "huge":
                self.native.load_huge(self.bind().native)
        except BaseException:
            self.close()
            raise

    def _check_precision(self) -> None:
        wanted, scheme = self.context.cpu.precision_mode, self.info.scheme
        if wanted == "enforce_fp32":
            if scheme != "f32" or self.config.kv_cache not in ("auto", "f32"):
                raise UnsupportedError(
                    f"precision_mode: enforce_fp32 takes a bundle of scheme f32 with keys and values of f32, found "
                    f"{scheme} with {self.config.kv_cache}; penstock export --scheme f32 makes one"
                )
        elif wanted and wanted != scheme:
            raise UnsupportedError(
                f"precision_mode: {wanted} was asked for, but the bundle computes in {scheme}; "
                f"penstock export --scheme {wanted} makes one that does"
            )

    def bind(self, num_threads: int | None = None, first: int = 0) -> BoundContext:
        """The context that all programs share; of ``num_threads`` threads one of its own, whose cores begin at
        ``first`` of the list, which goes round."""
        if num_threads is not None:
            at = first % max(1, len(self._cores))
            return BoundContext(num_threads, self._cores[at:] + self._cores[:at])
        if self._bound is None:
            self._bound = BoundContext(self.context.cpu.thread_num, self._cores)
        return self._bound

    def replace(self, native: core.Model) -> None:
        """Run on another opening of the file, in private memory, from now on."""
        if native is not self.native:
            self.native.close()
        self.native, self.is_private, self.shared_bytes = native, True, 0

    def check_unchanged(self) -> None:
        """InvalidFileError when the path is no longer the file that was opened."""
        check_same(self.path, self._stamp)

    def describe(self) -> dict[str, Any]:
        """What ``get_model_info`` gives of every program alike."""
        info, context = self.info, self.bind().native
        return {
            "model_path": str(self.path),
            "network": info.network,
            "scheme": info.scheme,
            "vocab_size": info.vocab_size,
            "max_context_len": info.context_len,
            "tail": info.tail,
            "weight_bytes": info.weight_bytes,
            "file_bytes": info.file_bytes,
            "weights": "private" if self.is_private else self.config.weights,
            "thread_num": context.num_threads,
            "cpu_level": context.cpu_level,
        }

    def close(self) -> None:
        """Gives file and threads back."""
        self.native.close()
        if self._bound is not None:
            self._bound.native.close()
