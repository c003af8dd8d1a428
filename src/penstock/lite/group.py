"""Models that hold equal weights once."""

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

__all__ = ["ModelGroup"]

_WEIGHTS: Final = "weights"
_COMPARED_PAGES: Final = 4096  # at a time: 16 MB
_MIN_RUN: Final = 16
"""Pages in a row: each run is a mapping, of which a process may have 65,530."""


class ModelGroup:
    """Models whose bundles have the same weights: they are compared byte by byte, and what is equal is mapped from one
    file alone.

    That finds bundles of one network and scheme: those that end otherwise (``--tail``), copies, and fine-tuned ones
    that share some layers; weights must lie at the same place of their segment.  Of other bundles nothing is shared,
    which is no error.  What is shared stays so whichever model is closed first.
    """

    def __init__(self) -> None:
        self._models: list[weakref.ref[Model]] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def shared_bytes(self) -> int:
        """Bytes of weights of the models that are open that are not held a second time."""
        opened = {model.opened for ref in self._models if (model := ref()) is not None}
        return sum(one.shared_bytes for one in opened if one is not None)

    def add_model(self, models: Model | Sequence[Model]) -> None:
        """Take models in, built ones now and others when they are built.

        InvalidArgumentError for what is no Model or is in a group; UnsupportedError for one whose weights are a private
        copy.
        """
        several: list[Any] = list(models) if isinstance(models, (list, tuple)) else [models]
        for model in several:
            if not isinstance(model, Model):
                raise InvalidArgumentError(f"add_model: expected a Model, found {type(model).__name__}")
            if model.group is not None:
                raise InvalidArgumentError("add_model: expected a Model that is in no group")
        for model in several:
            if model.opened is not None:
                self.share(model)
            else:
                self._models.append(weakref.ref(model))
            model.group = self

    def share(self, model: Model) -> None:
        """Look for the weights of a model that is built among those of the others."""
        check_process(self._pid, "group", "made", "make")
        with self._lock, model.in_use() as (opened, _):
            self._share(model, opened)
            if all(ref() is not model for ref in self._models):
                self._models.append(weakref.ref(model))

    @contextmanager
    def joining(self, model: Model, opened: OpenModel) -> Iterator[None]:
        """Look for the weights of what a model of the group is about to become, and let no other join meanwhile."""
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
            "add_model: a group shares weights that are mapped (weights 'mmap', not updated), but this model has a copy"
        )


def _share(opened: OpenModel, donor: OpenModel, done: npt.NDArray[np.bool_]) -> int:
    """Maps over equal pages of a model's weights but those ``done``, which it adds to; the bytes that were.

    A page that another donor had comes from there, so that of three equal models none is held twice.
    """
    segment, stamp = opened.native.segment(_WEIGHTS), donor.native.stamp
    try:
        where = stored_segments(read_metadata(donor.path, stamp)).get(_WEIGHTS)
    except InvalidFileError:  # another file has the donor's name: its pages are not the donor's
        return 0
    if segment is None or where is None or not segment.nbytes or not where[1]:
        return 0
    offset, num_bytes = where
    own = np.frombuffer(segment, np.uint8)
    if offset % mmap.PAGESIZE or own.ctypes.data % mmap.PAGESIZE:  # segments begin at 4096, pages may be larger
        return 0
    with open_again(donor.path, stamp) as file:
        common = min(num_bytes, own.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if not common:
            return 0
        with mmap.mmap(file.fileno(), common, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset) as view:
            theirs = np.frombuffer(view, np.uint8)
            shared = 0
            for begin, end in _equal_runs(own[:common], theirs, done):
                map_over(own.ctypes.data + begin, end - begin, file.fileno(), offset + begin)
                done[begin // mmap.PAGESIZE : end // mmap.PAGESIZE] = True
                shared += end - begin
            del theirs
        return shared


def _equal_runs(
    own: npt.NDArray[np.uint8], theirs: npt.NDArray[np.uint8], done: npt.NDArray[np.bool_]
) -> Iterator[tuple[int, int]]:
    """Byte ranges of whole pages that are equal and not done, long ones alone."""
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
