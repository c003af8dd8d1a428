"""The rules that combine the instances of requests into batches for one model or stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.config import check_integer, check_number
from penstock.errors import InvalidArgumentError

__all__ = ["MAX_BATCH_SIZE", "BatchRules"]

MAX_BATCH_SIZE: Final = 1 << 20


@dataclass(frozen=True)
class BatchRules:
    """Sizes of batches, how long a batch may wait to fill, and how many instances may wait.

    ``max_size``: the maximum number of instances in a batch.
    ``preferred_sizes``: a batch that reaches one of these sizes runs without waiting for more instances.
    ``max_delay_s``: the longest time in seconds that an instance waits for others to join its batch.
    ``padded_sizes``: the only sizes that the model accepts, ending with ``max_size``; a batch is padded to the next
    one.  Empty: the model accepts any size.
    ``max_waiting``: the maximum number of waiting instances; a larger request is accepted only if nothing waits.

    Raises InvalidArgumentError; its message starts with the name of the field.
    """

    max_size: int = 1
    preferred_sizes: tuple[int, ...] = ()
    max_delay_s: float = 0.0
    padded_sizes: tuple[int, ...] = ()
    max_waiting: int = 4096

    def __post_init__(self) -> None:
        check_integer("max_size", self.max_size, 1, MAX_BATCH_SIZE)
        check_integer("max_waiting", self.max_waiting, 1, 1 << 40)
        for name in ("preferred_sizes", "padded_sizes"):
            sizes = tuple(getattr(self, name))
            for size in sizes:
                check_integer(name, size, 1, self.max_size)
            if list(sizes) != sorted(set(sizes)):
                raise InvalidArgumentError(f"{name}: expected ascending sizes, got {sizes}", param=name)
            object.__setattr__(self, name, sizes)
        if self.padded_sizes and self.padded_sizes[-1] != self.max_size:
            raise InvalidArgumentError(
                f"padded_sizes: the largest must equal the batch size, {self.max_size}, got {self.padded_sizes[-1]}",
                param="padded_sizes",
            )
        check_number("max_delay_s", self.max_delay_s, 1e6, may_be_zero=True)

    def padded(self, count: int) -> int:
        """Return the size that a batch of ``count`` instances (at most ``max_size``) is padded to."""
        return next((size for size in self.padded_sizes if size >= count), count)
