"""Make the bundles of all ranks in one folder, for ``penstock export`` with ``--tp``, ``--pp`` or ``--cp``."""

from __future__ import annotations

from pathlib import Path

from penstock.core.rank_layout import RankLayout
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.file_kinds import is_gguf
from penstock.graph.rank_bundle import write_rank_bundle
from penstock.quant.folder import new_folder, private_folder
from penstock.runtime.build import ProgressCallback, build_in_child
from penstock.runtime.open import check_layout, registered_script
from penstock.sharding.folder import ShardedFolder, is_sharded, rank_bundle

__all__ = ["export_ranks"]


def export_ranks(
    model: Path,
    out: Path,
    layout: RankLayout | int,
    *,
    scheme: str | None = None,
    network: str | None = None,
    tail: str | None = None,
    rounded: bool = False,
    progress: ProgressCallback | None = None,
) -> int:
    """Write ``rank_0.psm``, ``rank_1.psm`` ... to the folder ``out``, which must not exist; return their bytes.

    ``model``: a checkpoint folder, a whole bundle, or a folder that is cut for ``layout``; of the latter each rank is
    made from its own part.  A number as ``layout`` is that of ranks of tensor parallelism.  ``rounded``: ranks send
    activations as integers where only linears with integer activations read them; not of a cut folder.  Raises what
    ``build_in_child`` and ``write_rank_bundle`` raise, and InvalidArgumentError, which names the option, for a folder
    that is cut for another layout.
    """
    layout = RankLayout(layout) if isinstance(layout, int) else layout
    is_cut = model.is_dir() and is_sharded(model)
    if is_cut:
        check_layout(model, ShardedFolder.open(model), layout)
        if rounded:
            raise UnsupportedError(f"rounded: expected the whole model, got {model}, which is cut", param="rounded")
    with new_folder(out) as folder, private_folder(out) as temporary:
        whole = model
        if (model.is_dir() or is_gguf(model)) and not is_cut:
            whole = temporary / "whole.psm"
            network = network or registered_script(model)
            build_in_child(model, whole, scheme=scheme, network=network, tail=tail, kind="cached", progress=progress)
        elif not is_cut and (scheme, network, tail) != (None, None, None):
            raise InvalidArgumentError(
                f"{model}: expected a checkpoint folder, because a bundle is exported already", param="model"
            )
        for rank in range(layout.world):
            part = folder / rank_bundle(rank)
            if is_cut:
                build_in_child(model, part, scheme=scheme, network=network, tail=tail, rank=rank, progress=progress)
            else:
                write_rank_bundle(whole, part, rank, layout, rounded=rounded)
        return sum(path.stat().st_size for path in folder.iterdir())
