"""Recurrent layers of general networks against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.core import layouts
from penstock.errors import InvalidArgumentError
from tests.support.errors import raises
from tests.support.general_ops import check, run
from tests.support.general_weights import packed, pad_rows, tiles

GATES = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}  # the gates of ONNX among torch's


def module_of(op: str, inputs: int, hidden: int, bidirectional: bool = False) -> Any:
    torch.manual_seed(inputs)
    kind = torch.nn.LSTM if op == "lstm" else torch.nn.GRU
    return kind(inputs, hidden, bidirectional=bidirectional)


def gates(op: str, parameter: Any) -> Any:
    """Return torch's rows in ONNX's order of gates."""
    blocks = parameter.detach().numpy().reshape(len(GATES[op]), -1, *parameter.shape[1:])
    return np.concatenate([blocks[i] for i in GATES[op]])


def weights_of(op: str, module: Any) -> list[Any]:
    """Return w, r and bias as the op takes them."""
    hidden = module.hidden_size
    names = ["", "_reverse"] if module.bidirectional else [""]

    def stacked(name: str) -> Any:
        rows = np.concatenate([gates(op, getattr(module, f"{name}_l0{end}")) for end in names])
        return pad_rows(rows.reshape(len(rows), -1), hidden)

    bias = np.stack([stacked("bias_ih")[:, 0], stacked("bias_hh")[:, 0]])
    return [tiles(stacked("weight_ih")), tiles(stacked("weight_hh")), packed(layouts.ROWS_F32, bias)]


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize(("steps", "batch", "inputs", "hidden"), [(5, 1, 3, 16), (7, 9, 20, 21), (1, 2, 4, 1)])
def test_recurrent_layers_match_torch(op: str, steps: int, batch: int, inputs: int, hidden: int) -> None:
    for directions in (1, 2):
        module = module_of(op, inputs, hidden, directions == 2)
        x = numbers(steps, batch, inputs)
        states = [numbers(directions, batch, hidden, seed=i) for i in range(2 if op == "lstm" else 1)]
        start = [torch.from_numpy(state) for state in states]
        with torch.no_grad():
            y, last = module(torch.from_numpy(x), tuple(start) if op == "lstm" else start[0])
        expected = [y.numpy().reshape(steps, batch, directions, hidden).swapaxes(1, 2)]
        expected += [h.numpy() for h in (last if op == "lstm" else [last])]
        attrs: dict[str, Any] = {"hidden": hidden, "direction": "bidirectional" if directions == 2 else "forward"}
        if op == "gru":
            attrs["linear_before_reset"] = True
        check(op, [x, *weights_of(op, module), *states, None], *expected, absolute=3e-6, **attrs)


def test_reverse_and_lengths() -> None:
    module = module_of("lstm", 6, 10)
    x, weights = numbers(6, 4, 6), weights_of("lstm", module)
    output = [((6, 1, 4, 10), np.float32), ((1, 4, 10), np.float32), ((1, 4, 10), np.float32)]
    lengths = np.array([6, 3, 0, 1])
    for direction in ("forward", "reverse"):
        for dtype in (np.int32, np.int64):
            y, h, _ = run(
                "lstm", [x, *weights, None, None, lengths.astype(dtype)], output, hidden=10, direction=direction
            )
        for i, length in enumerate(lengths):
            part = torch.from_numpy(x[:length, i : i + 1].copy())
            if direction == "reverse":
                part = part.flip(0)
            assert not y[length:, 0, i].any()
            if length == 0:
                assert not h[0, i].any()
                continue
            with torch.no_grad():
                theirs, (last, _) = module(part)
            theirs = theirs.flip(0) if direction == "reverse" else theirs
            np.testing.assert_allclose(y[:length, 0, i], theirs[:, 0].numpy(), atol=3e-6)
            np.testing.assert_allclose(h[0, i], last[0, 0].numpy(), atol=3e-6)


def test_gru_resets_before_the_product() -> None:
    module = module_of("gru", 5, 18)
    x, h = numbers(4, 3, 5), np.zeros((3, 18), np.float32)
    w, r = (gates("gru", p).reshape(3, 18, -1) for p in (module.weight_ih_l0, module.weight_hh_l0))
    wb, rb = (gates("gru", p).reshape(3, 18) for p in (module.bias_ih_l0, module.bias_hh_l0))
    expected = []
    for step in x:
        z, g = (1 / (1 + np.exp(-(step @ w[i].T + wb[i] + h @ r[i].T + rb[i]))) for i in range(2))
        n = np.tanh(step @ w[2].T + wb[2] + (g * h) @ r[2].T + rb[2])
        h = (1 - z) * n + z * h
        expected.append(h)
    check("gru", [x, *weights_of("gru", module), None, None], np.stack(expected)[:, None], h[None], absolute=3e-6,
          hidden=18, direction="forward", linear_before_reset=False)  # fmt: skip


def test_a_sequence_has_the_same_bits_in_any_batch() -> None:
    module = module_of("lstm", 8, 40)
    x, weights = numbers(3, 11, 8), weights_of("lstm", module)
    shapes = [((3, 1, 11, 40), np.float32), ((1, 11, 40), np.float32), ((1, 11, 40), np.float32)]
    attrs = {"hidden": 40, "direction": "forward"}
    together = run("lstm", [x, *weights, None, None, None], shapes, **attrs)[0]
    shapes = [((3, 1, 1, 40), np.float32), ((1, 1, 40), np.float32), ((1, 1, 40), np.float32)]
    alone = run("lstm", [x[:, 4:5], *weights, None, None, None], shapes, **attrs)[0]
    assert together[:, :, 4:5].tobytes() == alone.tobytes()


def test_wrong_recurrent_layers_are_refused_by_name() -> None:
    module = module_of("lstm", 6, 10)
    x, (w, r, bias) = numbers(2, 1, 6), weights_of("lstm", module)
    shapes = [((2, 1, 1, 10), np.float32), ((1, 1, 10), np.float32), ((1, 1, 10), np.float32)]
    attrs = {"hidden": 10, "direction": "forward"}
    h = numbers(1, 1, 10)
    for operands, change, name in (
        ([x, w, r, bias, None, None, None], {"direction": "both"}, "direction"),
        ([x, w, r, bias, None, None, None], {"hidden": 17}, "w"),
        ([x, w, r, bias, None, None, None], {"hidden": 0}, "hidden"),
        ([x, w, w, bias, None, None, None], {}, "r"),
        ([x, w, r, bias, h[0], None, None], {}, "h0"),
        ([x, w, r, bias, h, numbers(1, 2, 10), None], {}, "c0"),
        ([x, w, r, bias, None, None, np.array([1, 2])], {}, "lengths"),
    ):  # fmt: skip
        with raises(InvalidArgumentError, param=name):
            run("lstm", operands, shapes, **attrs | change)
