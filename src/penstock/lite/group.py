"""Models that share equal weights in memory."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.core.forked import check_process
from penstock.core.memory import map_over
from penstock.core.metadata import open_again, read_metadata, stored_segments
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.lite.model import Model
from penstock.lite.open_model import OpenModel
from penstock.validation import wrong_type

__all__ = ["ModelGroup"]

_WEIGHTS: Final = "weights"
_COMPARED_PAGES: Final = 4096  # 16 MB at a time
_MIN_RUN: Final = 16
"""The shortest run of pages that is shared: each run is a mapping, and a process may have 65,530 of them."""


class ModelGroup:
    """Models that share the equal weights of their bundles.

    Weights are compared byte by byte, and equal pages are mapped from one file.  The weights must have the same place
    in their segment, as in bundles of one network and scheme: copies, bundles with another tail (``--tail``), and
    fine-tuned models that keep some layers.  Bundles without equal weights share nothing, which is not an error.
    Shared pages stay shared in whatever order the models are closed.
    """

    def __init__(self) -> None:
        self._models: list[weakref.ref[Model]] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def shared_bytes(self) -> int:
        """The bytes of weights that open models share instead of holding a second copy."""
        bundles = {model.opened for ref in self._models if (model := ref()) is not None}
        return sum(bundle.shared_bytes for bundle in bundles if bundle is not None)

    def add_model(self, models: Model | Sequence[Model]) -> None:
        """Add models to the group.  A model that is not built yet shares its weights when it is built.

        Raises InvalidArgumentError for an object that is not a Model or is already in a group, and UnsupportedError for
        a model whose weights are a private copy.
        """
        several: list[Any] = list(models) if isinstance(models, (list, tuple)) else [models]
        for model in several:
            if not isinstance(model, Model):
                raise wrong_type("add_model", "a Model", model)
            if model.group is not None:
                raise InvalidArgumentError(
                    "add_model: expected a Model without a group, got one in a group", param="add_model"
                )
        for model in several:
            if model.opened is not None:
                self.share(model)
            else:
                self._models.append(weakref.ref(model))
            model.group = self

    def share(self, model: Model) -> None:
        """Share the weights of a built model with those of the other models."""
        check_process(self._pid, "group", "made", "make")
        with self._lock, model.in_use() as (opened, _):
            self._share(model, opened)
            if all(ref() is not model for ref in self._models):
                self._models.append(weakref.ref(model))

    @contextmanager
    def share_weights(self, model: Model, opened: OpenModel) -> Iterator[None]:
        """Share the weights of a bundle that ``model`` is about to take; no other model joins during the block."""
        check_process(self._pid, "group", "made", "make")
        with self._lock:
            self._share(model, opened)
            yield

    def _share(self, model: Model, opened: OpenModel) -> None:
        _refuse_private(opened)
        segment = opened.native.segment(_WEIGHTS)
        done = np.zeros((0 if segment is None else segment.nbytes) // mmap.PAGESIZE, bool)
        for ref in self._models:
            other = ref()
            donor = None if other is None or other is model else other.opened
            if donor is not None and not donor.is_private:
                opened.shared_bytes += _share(opened, donor, done)


def _refuse_private(opened: OpenModel) -> None:
    if opened.is_private or opened.config.weights != "mmap":
        raise UnsupportedError(
            "add_model: expected mapped weights (weights 'mmap', not updated), got a model with a private copy",
            param="add_model",
        )


def _share(opened: OpenModel, donor: OpenModel, done: npt.NDArray[np.bool_]) -> int:
    """Map the donor's pages over the equal pages of a model's weights; return the number of bytes.

    Pages that are already ``done`` are skipped, and new ones are added to it: a page that an earlier donor has comes
    from there, so that three equal models hold their weights once.
    """
    segment, stamp = opened.native.segment(_WEIGHTS), donor.native.stamp
    try:
        where = stored_segments(read_metadata(donor.path, stamp)).get(_WEIGHTS)
    except InvalidFileError:  # another file has the donor's name, and its pages are not the donor's
        return 0
    if segment is None or where is None or not segment.nbytes or not where[1]:
        return 0
    offset, num_bytes = where
    own = np.frombuffer(segment, np.uint8)
    if offset % mmap.PAGESIZE or own.ctypes.data % mmap.PAGESIZE:  # segments are aligned to 4096, pages may be larger
        return 0
    with open_again(donor.path, stamp) as file:
        common = min(num_bytes, own.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if not common:
            return 0
        with mmap.mmap(file.fileno(), common, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset) as view:
            donated = np.frombuffer(view, np.uint8)
            shared = 0
            for begin, end in _equal_runs(own[:common], donated, done):
                map_over(own.ctypes.data + begin, end - begin, file.fileno(), offset + begin)
                done[begin // mmap.PAGESIZE : end // mmap.PAGESIZE] = True
                shared += end - begin
            del donated
        return shared


def _equal_runs(
    own: npt.NDArray[np.uint8], theirs: npt.NDArray[np.uint8], done: npt.NDArray[np.bool_]
) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of at least _MIN_RUN whole pages that are equal and not done."""
    begin: int | None = None
    num_pages = own.nbytes // mmap.PAGESIZE
    for first in range(0, num_pages, _COMPARED_PAGES):
        last = min(num_pages, first + _COMPARED_PAGES)
        part = slice(first * mmap.PAGESIZE, last * mmap.PAGESIZE)
        equal = (own[part].view(np.uint64) == theirs[part].view(np.uint64)).reshape(last - first, -1).all(axis=1)
        for page, is_equal in enumerate((equal & ~done[first:last]).tolist(), first):
            if is_equal and begin is None:
                begin = page
            elif not is_equal and begin is not None:
                if page - begin >= _MIN_RUN:
                    yield begin * mmap.PAGESIZE, page * mmap.PAGESIZE
                begin = None
    if begin is not None and num_pages - begin >= _MIN_RUN:
        yield begin * mmap.PAGESIZE, num_pages * mmap.PAGESIZE
