"""The bundle from which a machine computes its stage: a whole one, or one that has the part of a rank only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.core import native
from penstock.core.comm import MAX_RANKS
from penstock.core.metadata import read_metadata
from penstock.core.rank_layout import RankLayout
from penstock.errors import FileAccessError, InvalidArgumentError
from penstock.graph.metadata import decode_metadata
from penstock.graph.rank_bundle import WHOLE
from penstock.runtime.open import bundle_of
from penstock.runtime.ranks.open_ranks import layout_of
from penstock.sharding.folder import ShardedFolder, is_sharded, rank_bundle, rank_name

__all__ = ["StageBundle", "find_bundle"]


@dataclass(frozen=True)
class StageBundle:
    """A bundle of a stage.

    ``checksum``: what all ranks have in common, that of the whole bundle.  ``is_part``: it has the part of ``rank``
    only, and ``others`` are the parts of the other ranks of the stage.  Of a whole bundle ``rank`` is one of those to
    compute, 0 for any.  ``metadata``: its graph and tables as stored.
    """

    path: Path
    checksum: str
    is_part: bool
    rank: int
    metadata: bytes
    others: tuple[StageBundle, ...] = ()

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
                f"rank: expected {rank or 'the part of a stage'} in {path}, got that of rank {own}", param="rank"
            )
        return cls(path, properties[WHOLE], True, own, metadata)

    def of(self, rank: int) -> StageBundle:
        """Return the bundle with the part of a rank; InvalidArgumentError if this machine has none."""
        for bundle in (self, *self.others):
            if not bundle.is_part or bundle.rank == rank:
                return bundle
        raise InvalidArgumentError(f"rank: expected the part of rank {rank} beside {self.path}, got none", param="rank")

    def parts(self, layout: RankLayout) -> list[str]:
        """Return the bundle, or those of all ranks of the stage, as ``open_rank`` takes them."""
        if not self.is_part:
            return [str(self.path)]
        paths = {bundle.rank: str(bundle.path) for bundle in (self, *self.others)}
        return [paths.get(rank, str(self.path)) for rank in range(layout.world)]


@contextmanager
def find_bundle(model: Path, rank: int = 0, scheme: str | None = None) -> Iterator[StageBundle]:
    """Yield the bundle of a stage.

    ``model``: a bundle, or a folder that is cut for ranks and has those of at least one stage.  ``rank``: a rank of the
    stage; 0 is the only stage that the folder has.  The bundles of a sharded folder are made under ``scheme`` and kept
    in the cache.  Raises FileAccessError, InvalidArgumentError and the errors of making and opening a bundle.
    """
    if not model.is_dir():
        if not model.is_file():
            raise FileAccessError(f"{model}: no such file; a stage needs the bundle, or its part of it", param="model")
        _check_no_scheme(scheme, model)
        yield StageBundle.read(model, rank)
        return
    name_of = rank_name if is_sharded(model) else rank_bundle
    present = [number for number in range(1, MAX_RANKS) if (model / name_of(number)).exists()]
    if not present or (rank and rank not in present):
        raise FileAccessError(
            f"{model}: expected {name_of(rank or 1)}, got no file; see `penstock shard`", param="model"
        )
    if not is_sharded(model):
        _check_no_scheme(scheme, model)
    layout = _layout(model, rank or present[0])
    if layout.pp == 1:
        raise InvalidArgumentError(
            f"{model}: expected a folder that is cut for a pipeline, got one for {layout}", param="model"
        )
    stages = {layout.place(number)[0] for number in present}
    if not rank and len(stages) > 1:
        numbers = ", ".join(map(str, present))
        raise InvalidArgumentError(f"rank: expected one of {numbers}, the parts in {model}, got none", param="rank")
    first_rank = layout.rank_of(layout.place(rank or present[0])[0], 0)
    ranks = range(first_rank, first_rank + layout.stage_ranks)
    if missing := [number for number in ranks if number not in present]:
        raise FileAccessError(f"{model}: expected {name_of(missing[0])} of the same stage, got no file", param="model")
    with ExitStack() as stack:
        paths = [model / rank_bundle(number) for number in ranks]
        if is_sharded(model):
            paths = [stack.enter_context(bundle_of(model, scheme, rank=number)) for number in ranks]
        first, *others = (StageBundle.read(path, number) for number, path in zip(ranks, paths, strict=True))
        yield replace(first, others=tuple(others))


def _layout(model: Path, rank: int) -> RankLayout:
    """Return the layout that a folder is cut for; ``rank``: one that it has."""
    if is_sharded(model):
        return ShardedFolder.open(model).strategy.layout
    with native.Model.open(model / rank_bundle(rank)) as bundle:
        return layout_of(decode_metadata(read_metadata(model / rank_bundle(rank), bundle.stamp))[0])


def _check_no_scheme(scheme: str | None, model: Path) -> None:
    if scheme is not None:
        raise InvalidArgumentError(f"scheme: expected none for bundles ({model}), got {scheme!r}", param="scheme")
