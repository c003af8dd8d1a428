"""The embedding and the output head: token ids to rows, and rows to logits."""

from __future__ import annotations

from penstock.nn.base import Tensor
from penstock.nn.batch import gather_rows
from penstock.nn.linear import Linear
from penstock.nn.module import Module
from penstock.nn.weight import MatrixLayer
from penstock.ops.call import ops

__all__ = ["Embedding", "LMHead", "OutputRows", "VocabParallelEmbedding"]


class Embedding(MatrixLayer):
    """An embedding table: ``weight`` [num_rows, dim].  Over several ranks each stores a part of the rows."""

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ids [T] int32: [T, dim]."""
        y: Tensor = ops.embedding(ids, self.kernel_weight(), dim=self.cols)
        return y


class VocabParallelEmbedding(Embedding):
    """The same as ``Embedding``, under the name that scripts of other frameworks use."""


class OutputRows(Module):
    """Selects the wanted rows from the hidden rows of a step, for networks with layers between these and the head.

    ``width`` is that of the hidden rows, if it is not the width of the head's input.
    """

    def __init__(self, width: int = 0) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor, output_rows: Tensor) -> Tensor:
        """Return the rows ``output_rows`` [R] of x [T, hidden]: [R, hidden]."""
        return gather_rows(x, output_rows)


class LMHead(Linear):
    """Hidden rows to logits, for only the wanted rows.  ``tied`` is an embedding whose weight is shared."""

    def __init__(
        self, in_features: int, vocab_size: int, bias: bool = False, *, tied: MatrixLayer | None = None
    ) -> None:
        super().__init__(in_features, vocab_size, bias)
        if tied is not None:
            self.weight = tied.weight

    def forward(self, x: Tensor, output_rows: Tensor | None = None) -> Tensor:
        """Return the logits [R, vocab] of the rows ``output_rows`` [R] of x [T, in_features]; None selects all rows."""
        return super().forward(x if output_rows is None else gather_rows(x, output_rows))
