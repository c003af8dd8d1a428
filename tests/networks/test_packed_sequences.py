"""Layers over packed sequences, at free batches and lengths, give what PyTorch gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import penstock
from penstock.errors import UnsupportedError
from tests.support.errors import raises


class Packed(nn.Module):
    """Runs two layers in both directions over rows of different lengths, with states or without."""

    def __init__(self, kind: Any, batch_first: bool, is_sorted: bool, has_states: bool) -> None:
        super().__init__()
        self.layers: nn.RNNBase = kind(6, 5, 2, bidirectional=True, batch_first=batch_first)
        self.is_sorted, self.has_states = is_sorted, has_states

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        first = self.layers.batch_first
        packed = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=self.is_sorted)
        states: Any = None
        if self.has_states:
            states = torch.arange(4 * x.shape[0 if first else 1] * 5).reshape(4, -1, 5) * 0.01
            states = (states, -states) if isinstance(self.layers, nn.LSTM) else states
        out, last = self.layers(packed, states)
        rows, lengths = pad_packed_sequence(out, batch_first=first, padding_value=-1.0)
        return rows, lengths, *(last if isinstance(last, tuple) else (last,))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize(("batch_first", "is_sorted", "has_states"), [(True, False, True), (False, True, False)])
def test_packed_rows_have_their_lengths(kind: Any, batch_first: bool, is_sorted: bool, has_states: bool) -> None:
    torch.manual_seed(0)
    module = Packed(kind, batch_first, is_sorted, has_states).eval()

    def example(size: int, lengths: list[int]) -> tuple[Tensor, Tensor]:
        x = torch.randn(len(lengths), size, 6)
        x = x if batch_first else x.transpose(0, 1).contiguous()
        return x, torch.tensor(sorted(lengths, reverse=True) if is_sorted else lengths)

    first = example(5, [3, 5, 1])
    axes = ("B", "S", 6) if batch_first else ("S", "B", 6)
    network = penstock.capture(module, first, shapes={"x": axes, "lengths": ("B",)})
    with network.compile() as predictor, torch.no_grad():
        for example_ in (first, example(7, [2, 7])):
            found = predictor.run([tensor.numpy() for tensor in example_])
            for ours, theirs in zip(found, module(*example_), strict=True):
                np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=1e-5)


class Unknown(nn.Module):
    """Makes a packed sequence itself, whose lengths are not known."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(PackedSequence(x, torch.tensor([2, 1])))[1]  # type: ignore[no-any-return]


def test_other_packed_sequences_are_refused() -> None:
    with raises(UnsupportedError, code="packed_sequence"):
        penstock.capture(Unknown(), torch.randn(3, 4))
