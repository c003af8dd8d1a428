"""How ranks divide a network."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import check_integer
from penstock.core.comm import MAX_RANKS
from penstock.errors import InvalidArgumentError

__all__ = ["RankLayout"]


@dataclass(frozen=True)
class RankLayout:
    """``pp`` stages of ``tp`` ranks each, or ``cp`` ranks that divide each context, and the weights as ``tp`` do.

    With one stage, rank t is rank t of it.  With several, rank 0 is the coordinator, which has no layers, and rank
    1 + s * tp + t is rank t of stage s.  Raises InvalidArgumentError (``tensor_parallel_size``,
    ``pipeline_parallel_size``, ``context_parallel_size``) for numbers that no group of ranks has.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        """Refuse numbers that no group of ranks has."""
        check_integer("tensor_parallel_size", self.tp, 1, MAX_RANKS)
        check_integer("pipeline_parallel_size", self.pp, 1, MAX_RANKS - 1)
        check_integer("context_parallel_size", self.cp, 1, MAX_RANKS)
        for name, size in (("tensor_parallel_size", self.tp), ("pipeline_parallel_size", self.pp)):
            if self.cp > 1 and size > 1:
                raise InvalidArgumentError(
                    f"{name}: expected 1 with context_parallel_size {self.cp}, whose ranks divide the weights too, "
                    f"found {size}",
                    param=name,
                )
        if self.pp > 1:
            check_integer("tensor_parallel_size * pipeline_parallel_size", self.tp * self.pp, 2, MAX_RANKS - 1)

    @property
    def world(self) -> int:
        """The number of processes."""
        return self.stage_ranks if self.pp == 1 else 1 + self.num_computing

    def __str__(self) -> str:
        """Return the sizes that are not 1."""
        sizes = {"tp": self.tp, "pp": self.pp, "cp": self.cp}
        return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"

    def first_difference(self, other: RankLayout) -> tuple[str, int, int] | None:
        """Return the first size in which two layouts differ, as its option, this and the other one's value."""
        for name, short in (("tensor", "tp"), ("pipeline", "pp"), ("context", "cp")):
            own, found = getattr(self, short), getattr(other, short)
            if own != found:
                return f"{name}_parallel_size", own, found
        return None

    @property
    def stage_ranks(self) -> int:
        """The number of ranks of one stage."""
        return self.tp * self.cp

    @property
    def num_computing(self) -> int:
        """The number of ranks that have weights."""
        return self.stage_ranks * self.pp

    def place(self, rank: int) -> tuple[int, int]:
        """Return the stage of a rank, and its number within the stage; (-1, 0) for the coordinator."""
        if self.pp == 1:
            return 0, rank
        return (-1, 0) if rank == 0 else divmod(rank - 1, self.stage_ranks)

    def rank_of(self, stage: int, place: int) -> int:
        """Return the rank with a number within a stage."""
        return place if self.pp == 1 else 1 + stage * self.stage_ranks + place
