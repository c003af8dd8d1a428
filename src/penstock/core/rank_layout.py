"""The division of a network over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import check_integer
from penstock.core.comm import MAX_RANKS
from penstock.errors import InvalidArgumentError

__all__ = ["RankLayout"]


@dataclass(frozen=True)
class RankLayout:
    """``pp`` stages of ``tp`` * ``cp`` ranks each, which divide the weights; ``cp`` of them divide each context.

    Rank t * cp + c of a stage has part t of the attention heads and part c of the contexts.  With one stage, rank r is
    rank r of it.  With several, rank 0 is the coordinator, which has no layers, and rank 1 + s * tp * cp + r is rank r
    of stage s.  Raises InvalidArgumentError (``tensor_parallel_size``, ``pipeline_parallel_size``,
    ``context_parallel_size``) for numbers that no group of ranks has.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        """Refuse numbers that no group of ranks has."""
        check_integer("tensor_parallel_size", self.tp, 1, MAX_RANKS)
        check_integer("pipeline_parallel_size", self.pp, 1, MAX_RANKS - 1)
        check_integer("context_parallel_size", self.cp, 1, MAX_RANKS)
        most = MAX_RANKS if self.pp == 1 else MAX_RANKS - 1  # rank 0 of a pipeline has no layers
        if self.num_computing > most:
            sizes = {"tensor": self.tp, "pipeline": self.pp, "context": self.cp}
            name = next(f"{name}_parallel_size" for name, size in sizes.items() if size > 1)
            raise InvalidArgumentError(
                f"{name}: expected at most {most} ranks in all, got {self.num_computing} ({self})", param=name
            )

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
            own, actual = getattr(self, short), getattr(other, short)
            if own != actual:
                return f"{name}_parallel_size", own, actual
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
