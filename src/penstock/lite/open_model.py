"""An open bundle: the file, the settings that it was opened with, and the context that its programs run on."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from penstock.core import native as core
from penstock.core.comm import SharedComm
from penstock.core.metadata import check_same
from penstock.core.predict import GENERAL_NETWORK
from penstock.errors import UnsupportedError
from penstock.file_kinds import refuse_mindspore
from penstock.lite.affinity import BoundContext, chosen_cores
from penstock.lite.device import Context, check_target
from penstock.lite.ranks import agree, agreement, check_rank, join_group, rank_of, share_of_cores, threads_of_rank
from penstock.lite.sequences import program_options
from penstock.lite.settings import ModelConfig, read_config
from penstock.runtime.stored_kv import stored_kv_layout
from penstock.validation import refusal, wrong_type

__all__ = ["ModelType", "OpenModel"]


class ModelType(Enum):
    """The type of a model file."""

    PENSTOCK = "penstock"
    """A bundle, ``.psm``."""
    MINDIR = "mindir"
    """A file of MindSpore, which is refused with the way to come over."""
    MINDIR_LITE = "mindir_lite"
    """A file of MindSpore Lite, which is refused in the same way."""


class OpenModel:
    """An open bundle, and the context that its programs run on."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        model_type: ModelType,
        context: Context | None,
        config: str | os.PathLike[str] | Mapping[str, Any] | ModelConfig | None,
    ) -> None:
        if not isinstance(model_type, ModelType):
            raise refusal("model_type", "ModelType.PENSTOCK", model_type)
        if not isinstance(path, (str, os.PathLike)) or not str(path):
            raise refusal("model_path", "the path of a bundle", path)
        refuse_mindspore(Path(path), param="model_path")
        if model_type is not ModelType.PENSTOCK:
            raise UnsupportedError(
                f"model_type: expected ModelType.PENSTOCK, got ModelType.{model_type.name}: files of MindSpore cannot "
                "be read; `penstock export FOLDER OUT.psm` makes a bundle of the checkpoint folder",
                param="model_type",
            )
        if context is not None and not isinstance(context, Context):
            raise wrong_type("context", "a Context", context)
        self.context = context or Context()
        check_target(self.context.target)
        self.config = read_config(config)
        self.path = Path(path)
        self._comm: SharedComm | None = None
        self._bound: BoundContext | None = None
        self.is_private = False
        self.shared_bytes = 0
        """The bytes of weights that are mapped from the file of another model of the group."""
        self.native = core.Model.open(self.path, verify=self.config.verify)
        self.info = self.native.info
        self._stamp = self.native.stamp  # of the first opening; ``replace`` does not change it
        try:
            if self.config.kv_cache == "auto" and (stored := stored_kv_layout(self.native.segment("config.json"))):
                self.config = replace(self.config, kv_cache=stored)
            self._check_precision()
            self._join()
            if self.config.weights == "huge":
                self.native.load_huge(self.bind().native)
        except BaseException:
            self.close()
            raise

    def _check_precision(self) -> None:
        mode, scheme = self.context.cpu.precision_mode, self.info.scheme
        if mode == "enforce_fp32":
            if scheme != "f32" or self.config.kv_cache not in ("auto", "f32"):
                raise UnsupportedError(
                    f"precision_mode: enforce_fp32 requires a bundle with scheme f32 and kv_cache f32, got {scheme} "
                    f"with {self.config.kv_cache}; use penstock export --scheme f32",
                    param="precision_mode",
                )
        elif mode and mode != scheme:
            raise UnsupportedError(
                f"precision_mode: {mode} requires a bundle with scheme {mode}, got {scheme}; use penstock export "
                f"--scheme {mode}",
                param="precision_mode",
            )

    def _join(self) -> None:
        """Choose threads and cores; of the bundle of a rank, wait for the other ranks."""
        if self.info.kind == GENERAL_NETWORK:
            self.rank = core.RankInfo(0, 1, 0)
        else:
            options = program_options(self.info, self.config, self.config.batch_size)
            self.rank = rank_of(self.path, self.native, options)
        cpu = self.context.cpu
        check_rank(self.path, self.rank, cpu)
        self._cores = share_of_cores(cpu, self.rank) or chosen_cores(cpu)
        self._num_threads = threads_of_rank(cpu, self.rank)
        self._comm = join_group(self.rank, self.config, self._num_threads)

    def agree(self) -> None:
        """Wait until every rank has opened its part, at most ``join_timeout_s``; the error names what differs."""
        if self._comm is None:
            return
        limit_s = self.config.join_timeout_s
        timer = threading.Timer(limit_s, self.abort, [f"the other ranks did not open within {limit_s} s"])
        timer.daemon = True
        timer.start()
        try:
            agree(self.bind().native, agreement(self.path, self._stamp, self.config))
        finally:
            timer.cancel()
            timer.join()  # the comm outlives its last abort

    def abort(self, reason: str) -> None:
        """End the other ranks' waits for this one."""
        if self._comm is not None:
            self._comm.abort(f"rank {self.rank.rank}: {reason}")

    def bind(self, num_threads: int | None = None, first: int = 0) -> BoundContext:
        """Return the context that all programs share.

        With ``num_threads`` return a new context of that many threads; its cores begin at index ``first`` of the list,
        modulo the length of the list.
        """
        if num_threads is not None:
            at = first % max(1, len(self._cores))
            return BoundContext(num_threads, self._cores[at:] + self._cores[:at])
        if self._bound is None:
            self._bound = BoundContext(self._num_threads, self._cores, self._comm)
        return self._bound

    def replace(self, native: core.Model) -> None:
        """Switch to another opening of the same file, in private memory."""
        if native is not self.native:
            self.native.close()
        self.native, self.is_private, self.shared_bytes = native, True, 0

    def check_unchanged(self) -> None:
        """Raise InvalidFileError when the path is no longer the file that was opened."""
        check_same(self.path, self._stamp)

    def describe(self) -> dict[str, Any]:
        """Return the entries of ``get_model_info`` that do not depend on a program."""
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
        """Close the file and the threads."""
        self.native.close()
        if self._bound is not None:
            self._bound.native.close()
        if self._comm is not None:
            self._comm.close()
