"""The bundle from which a machine computes its stage: a whole one, or one that has the part of a rank only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.core import native
from penstock.core.comm import MAX_RANKS
from penstock.core.metadata import read_metadata
from penstock.core.rank_layout import RankLayout
from penstock.errors import FileAccessError, InvalidArgumentError
from penstock.graph.metadata import decode_metadata
from penstock.graph.rank_bundle import WHOLE
from penstock.runtime.open import bundle_of
from penstock.sharding.folder import is_sharded, rank_bundle, rank_name

__all__ = ["StageBundle", "find_bundle"]


@dataclass(frozen=True)
class StageBundle:
    """A bundle of a stage.

    ``checksum``: what all ranks have in common, that of the whole bundle.  ``is_part``: it has the part of ``rank``
    only.  Of a whole bundle ``rank`` is the one to compute, 0 for any.  ``metadata``: its graph and tables as stored.
    """

    path: Path
    checksum: str
    is_part: bool
    rank: int
    metadata: bytes

    @classmethod
    def read(cls, path: Path, rank: int = 0) -> StageBundle:
        """Read a bundle for rank ``rank`` (0: any); raises the errors of opening one.

        Raises InvalidArgumentError for the part of another rank, or of rank 0, which has no layers.
        """
        with native.Model.open(path) as model:
            metadata = read_metadata(path, model.stamp)
        properties = decode_metadata(metadata)[0].properties
        if WHOLE not in properties:
            return cls(path, hashlib.sha256(metadata).hexdigest(), False, rank, metadata)
        own = int(properties.get("rank", "0"))
        if own == 0 or own != (rank or own):
            raise InvalidArgumentError(
                f"rank: expected {rank or 'the part of a stage'} in {path}, found that of rank {own}", param="rank"
            )
        return cls(path, properties[WHOLE], True, own, metadata)

    def parts(self, layout: RankLayout) -> list[str]:
        """Return the bundle as ``open_rank`` takes it."""
        return [str(self.path)] * (layout.world if self.is_part else 1)


@contextmanager
def find_bundle(model: Path, rank: int = 0, scheme: str | None = None) -> Iterator[StageBundle]:
    """Yield the bundle of a stage.

    ``model``: a bundle, or a folder that is cut for ranks and has at least one of them.  ``rank``: which of them; 0 is
    the only one that the folder has, beside that of rank 0.  The bundle of a sharded folder is made under ``scheme``
    and kept in the cache.  Raises FileAccessError, InvalidArgumentError and the errors of making and opening a bundle.
    """
    if not model.is_dir():
        if not model.is_file():
            raise FileAccessError(f"{model}: no such file; a stage needs the bundle, or its part of it")
        _check_no_scheme(scheme, model)
        yield StageBundle.read(model, rank)
        return
    name_of = rank_name if is_sharded(model) else rank_bundle
    found = [number for number in range(1, MAX_RANKS) if (model / name_of(number)).exists()]
    if not found or (rank and rank not in found):
        raise FileAccessError(f"{model}: expected {name_of(rank or 1)}, found no such part; see `penstock shard`")
    if not rank and len(found) > 1:
        numbers = ", ".join(map(str, found))
        raise InvalidArgumentError(f"rank: expected one of {numbers}, the parts in {model}, got none", param="rank")
    rank = rank or found[0]
    if not is_sharded(model):
        _check_no_scheme(scheme, model)
        yield StageBundle.read(model / rank_bundle(rank), rank)
        return
    with bundle_of(model, scheme, rank=rank) as bundle:
        yield StageBundle.read(bundle, rank)


def _check_no_scheme(scheme: str | None, model: Path) -> None:
    if scheme is not None:
        raise InvalidArgumentError(f"scheme: expected none for bundles ({model}), found {scheme!r}", param="scheme")
