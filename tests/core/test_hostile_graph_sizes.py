"""Files with many nodes: read, planned and bound in a time that grows with their size."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from penstock.core.native import Context, CoreProgram, Model, plan
from penstock.graph.ir import Graph, Node
from penstock.graph.passes.rewrite import order_values
from tests.support.core_steps import OPTIONS, batch
from tests.support.tiny_graph import HIDDEN, Builder, R, T, c, value, weight, write_bundle

NUM_NODES = 10000  # a file may have 16,384
MAX_SECONDS = 0.3  # of processor time; comparing every value with every other took 0.6


def many_norms(num_nodes: int) -> Graph:
    """Norms with two results each, half of which live from the beginning to the end."""
    b = Builder("f32", [0])
    x = b.value("hidden", T, c(HIDDEN))
    b.node("embedding", "embed", [value("token_ids"), b.weight("embed.weight", 101, HIDDEN)], [x], dim=HIDDEN)
    b.weight("norm.weight", 1, HIDDEN)
    residual, sums = x, []
    for i in range((num_nodes - 4) // 2):
        y, total = b.value(f"y{i}", T, c(HIDDEN)), b.value(f"sum{i}", T, c(HIDDEN))
        b.node("add_rms_norm", f"n{i}", [value(x), value(residual), weight("norm.weight")], [y, total], eps=1e-6)
        x, residual = y, total
        sums.append(total)
    for i, total in enumerate(reversed(sums)):
        y = b.value(f"z{i}", T, c(HIDDEN))
        b.node("add", f"a{i}", [value(x), value(total)], [y])
        x = y
    last = b.value("last", R, c(HIDDEN))
    b.node("gather_rows", "gather", [value(x), value("output_rows")], [last])
    b.graph.output = b.linear("lm_head", last, 101, HIDDEN, dim=R)
    return b.graph


def many_attentions(num_nodes: int) -> Graph:
    """Attention nodes behind which no key is written, so that all run over the wanted tokens only."""
    b = Builder("f32", [0])
    x = b.value("hidden", T, c(HIDDEN))
    b.node("embedding", "embed", [value("token_ids"), b.weight("embed.weight", 101, HIDDEN)], [x], dim=HIDDEN)
    b.value("cos_sin", T, c(8))
    b.node("rotary_embedding", "rotary", [value("positions"), b.weight("inv_freq", 1, 4)], ["cos_sin"], scaling=1.0)
    b.attention("attn", x, 0, 0)
    attention = next(node for node in b.graph.nodes if node.op == "attention")
    q = "attn.out"
    for i in range(num_nodes - 11):
        out = b.value(f"out{i}", T, c(4), c(8))
        inputs = [value(q), *attention.inputs[1:]]
        b.graph.nodes.append(Node("attention", f"t{i}", inputs, [out], dict(attention.attrs)))
        q = out
    b.value("flat", T, c(HIDDEN), base=q)
    mixed = b.linear("mixed", "flat", HIDDEN, HIDDEN)
    last = b.value("last", R, c(HIDDEN))
    b.node("gather_rows", "gather", [value(mixed), value("output_rows")], [last])
    b.graph.output = b.linear("lm_head", last, 101, HIDDEN, dim=R)
    return b.graph


@pytest.mark.long
@pytest.mark.parametrize("make", [many_norms, many_attentions])
def test_many_nodes_are_planned_in_bounded_time(make: Callable[[int], Graph], context: Context, tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "hostile.psm", make(NUM_NODES))
    times = []
    for _ in range(3):
        begin = time.thread_time()
        with Model.open(path) as model:
            assert NUM_NODES - 16 <= model.info.num_nodes <= NUM_NODES
            assert plan(model, context, OPTIONS).temporary_bytes > 0
            with CoreProgram(model, context, OPTIONS):
                times.append(time.thread_time() - begin)
    assert min(times) < MAX_SECONDS  # other work on the cores makes single ones longer


def halves() -> npt.NDArray[np.float32]:
    """A table of numbers of about plus or minus a half, with which sums and products neither grow nor vanish."""
    rng = np.random.default_rng(5)
    return (rng.uniform(0.4, 0.6, (101, HIDDEN)) * rng.choice([-1, 1], (101, HIDDEN))).astype(np.float32)


def random_sums(num_nodes: int) -> tuple[Graph, npt.NDArray[np.float32]]:
    """Sums and products of values of two sizes and random ages, and the exact result for each row of the table."""
    rng = np.random.default_rng(6)
    half = HIDDEN // 2
    table = halves()
    b = Builder("f32", [0])
    x = b.value("hidden", T, c(HIDDEN))
    b.node("embedding", "embed", [value("token_ids"), b.weight("embed.weight", 101, HIDDEN)], [x], dim=HIDDEN)
    factor = {HIDDEN: x, half: b.value("hidden.half", T, c(half), base=x)}
    numbers = {x: table, factor[half]: table[:, :half]}
    pools = {HIDDEN: [x], half: [factor[half]]}

    def compute(op: str, name: str, size: int, left: str, right: str) -> str:
        y = b.value(name, T, c(size))
        b.node(op, name, [value(left), value(right)], [y])
        numbers[y] = numbers[left] + numbers[right] if op == "add" else numbers[left] * numbers[right]
        return y

    for i in range((num_nodes - 3) // 2):
        size = HIDDEN if rng.random() < 0.5 else half
        ages = np.minimum(rng.geometric(0.02, 2), len(pools[size]))
        total = compute("add", f"s{i}", size, *(pools[size][-age] for age in ages))
        y = compute("mul", f"p{i}", size, total, factor[size])
        pools[size].append(y)
        if size == HIDDEN:
            view = b.value(f"v{i}", T, c(half), base=y, offset=half)
            numbers[view] = numbers[y][:, half:]
            pools[half].append(view)
    last = b.value("last", R, c(half))
    result = next(name for name in reversed(pools[half]) if b.graph.values[name].base is None)
    b.node("gather_rows", "gather", [value(result), value("output_rows")], [last])
    b.graph.output = b.linear("lm_head", last, 101, half, dim=R)
    order_values(b.graph)
    return b.graph, numbers[result]


@pytest.mark.parametrize("num_nodes", [900, 4600])
def test_placed_values_do_not_overlap(num_nodes: int, context: Context, tmp_path: Path) -> None:
    """Beyond some thousands of values they are placed by size, not into gaps."""
    graph, wanted = random_sums(num_nodes)
    values = {w.name: np.zeros((w.rows, w.cols), np.float32) for w in graph.weights.values()}
    values["embed.weight"] = halves()
    path = write_bundle(tmp_path / "sums.psm", graph, values=values)
    tokens = [3, 1, 4, 100]
    with Model.open(path) as model, CoreProgram(model, context, OPTIONS) as program:
        program.run(batch([(0, tokens, (1,))], hidden=True))
        np.testing.assert_array_equal(program.hidden(), wanted[tokens])
