"""Contexts, levels, threads, errors, single ops."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.core import native
from penstock.core.native import Context, CoreProgram, CoreTensor, Model, cpu_levels, op_schemas, run_op
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.ops.table import OPS
from tests.support.core_steps import OPTIONS, batch, i32
from tests.support.errors import raises

I8, I4G32 = 21, 22  # of ps_layout


def test_op_tables_of_core_and_package_are_equal() -> None:
    assert op_schemas()[: len(OPS)] == [f"{op.name}.{op.version} {op.schema}" for op in OPS]


def test_levels_are_known_and_generic_runs_everywhere() -> None:
    levels = dict(cpu_levels())
    assert levels["generic"]
    assert set(levels) <= {"generic", "avx2", "avx512", "amx", "neon", "neon_dot"}
    best = next(name for name, runnable in cpu_levels() if runnable)
    with Context(1) as context:
        assert context.cpu_level == os.environ.get("PENSTOCK_CPU", best)


def test_level_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CPU", "generic")
    with Context(1) as context:
        assert context.cpu_level == "generic"
    best = next(name for name, runnable in cpu_levels() if runnable)
    with Context(1, best) as context:  # an option beats the environment
        assert context.cpu_level == best


def test_unknown_level_is_refused() -> None:
    with raises(InvalidArgumentError, param="cpu_level", match=r'^cpu_level: .*generic, got "avx9"'):
        Context(1, "avx9")


@pytest.mark.parametrize("num_threads", [-1, 1025])
def test_impossible_threads_are_refused(num_threads: int) -> None:
    with raises(InvalidArgumentError, param="num_threads"):
        Context(num_threads)


def test_threads_default_to_what_the_machine_allows() -> None:
    with Context() as context:
        assert 1 <= context.num_threads <= len(os.sched_getaffinity(0))


def test_more_threads_than_cores_make_progress(bundle_of: Callable[..., Path]) -> None:
    with Model.open(bundle_of("w8a8")) as model, Context(9) as many, CoreProgram(model, many, OPTIONS) as program:
        for _ in range(20):
            program.run(batch([(0, [1, 2, 3], (1,))]))
        assert np.isfinite(program.logits()).all()


def test_forked_child_is_refused(bundle_of: Callable[..., Path]) -> None:
    with Model.open(bundle_of()) as model, Context(2) as context, CoreProgram(model, context, OPTIONS) as program:
        program.run(batch([(0, [1], (1,))]))
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            text = "no error"
            try:
                program.run(batch([(0, [1], (1,))]))
            except InvalidArgumentError as error:
                text = str(error)
            finally:
                os.write(write, text.encode())
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            message = pipe.read()
        os.waitpid(child, 0)
        assert re.search(r"context: made in process \d+ and used in its forked child \d+", message), message
        program.run(batch([(0, [1], (1,))]))


def test_use_after_close_raises(bundle_of: Callable[..., Path]) -> None:
    model, context = Model.open(bundle_of()), Context(1)
    program = CoreProgram(model, context, OPTIONS)
    program.close()
    program.close()
    with raises(InvalidArgumentError, code="closed"):
        program.logits()
    model.close()
    with raises(InvalidArgumentError, code="closed"):
        _ = model.info
    context.close()
    with raises(InvalidArgumentError, code="closed"):
        _ = context.num_threads


def test_a_program_is_not_asked_once_its_model_is_closed(bundle_of: Callable[..., Path]) -> None:
    with Model.open(bundle_of()) as model, Context(1) as context:
        program = CoreProgram(model, context, OPTIONS)
    for use in (program.logits, lambda: program.kv(0)):
        with raises(InvalidArgumentError, code="closed"):
            use()
    program.close()


def test_views_outlive_what_they_look_into(bundle_of: Callable[..., Path]) -> None:
    model = Model.open(bundle_of())
    with Context(1) as context, CoreProgram(model, context, OPTIONS) as program:
        program.run(batch([(0, [1, 2, 3], (2,))]))
        logits, pages, segment = program.logits(), program.kv(0), model.segment("weights")
        before = logits.tobytes(), pages.tobytes(), bytes(segment or b"")
    model.close()
    assert before == (logits.tobytes(), pages.tobytes(), bytes(segment or b""))


def test_logits_before_a_step_are_refused(model: Model, context: Context) -> None:
    with CoreProgram(model, context, OPTIONS) as program, raises(InvalidArgumentError, param="program"):
        program.logits()


# ---- single ops


def tensor(array: np.ndarray) -> CoreTensor:
    dtype = {"float32": 1, "int32": 5}[array.dtype.name]
    return CoreTensor(array.ctypes.data, dtype, array.shape, int(np.prod(array.shape[1:])))


HIGH, LOW = i32(0, 2), i32(0, -1)
X, Y = np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((2, 3), np.float32)


def test_op_runs(context: Context) -> None:
    run_op(context, "add", [tensor(X), tensor(X), tensor(Y)], {})
    assert (Y == 2 * X).all()


def test_op_takes_strided_rows(context: Context) -> None:
    wide = np.arange(20, dtype=np.float32).reshape(2, 10)
    strided = CoreTensor(wide.ctypes.data, 1, (2, 3), 10)
    run_op(context, "add", [strided, strided, tensor(Y)], {})
    assert (2 * wide[:, :3] == Y).all()


def test_wrong_op_calls_are_refused_by_name(context: Context) -> None:
    long = np.zeros((3, 3), np.float32)
    wrong: list[tuple[str, list[CoreTensor | None], dict[str, float | str], str, str]] = [
        ("add", [tensor(X), tensor(Y)], {}, "num_tensors", " 3 .*got 2"),
        ("add", [tensor(X), tensor(long), tensor(Y)], {}, "add", r"second argument: .*f32 \[2, 3\]"),
        ("add", [tensor(X), tensor(X), tensor(long)], {}, "add", r"output 0: .*f32 \[2, 3\], got f32 \[3, 3\]"),
        ("add", [tensor(X), None, tensor(Y)], {}, "b", "null"),
        ("add", [tensor(X), tensor(X), tensor(Y)], {"eps": 1.0}, "add", "eps: .*attribute"),
        ("gelu", [tensor(X), tensor(Y)], {}, "gelu", "approximate: .*missing"),
        ("gelu", [tensor(X), tensor(Y)], {"approximate": "erf"}, "approximate", '"none" or "tanh"'),
        ("gather_rows", [tensor(X), tensor(HIGH), tensor(Y)], {}, "rows", ""),
        ("gather_rows", [tensor(X), tensor(LOW), tensor(Y)], {}, "rows", ""),
        ("topk", [tensor(X), tensor(Y), tensor(Y)], {"k": 4}, "k", "1 to 3, got 4"),
    ]
    for op, tensors, attrs, param, fact in wrong:
        with raises(InvalidArgumentError, param=param, match=rf"^{op}: .*{fact}"):
            run_op(context, op, tensors, attrs)
    with raises(UnsupportedError, param="op", match="convolve"):
        run_op(context, "convolve", [], {})


def test_topk_and_argmax_take_the_first_of_equals(context: Context) -> None:
    x = np.array([[1, 5, 5, 0, 5], [2, 2, 2, 2, 2]], np.float32)
    values, ids, best = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.int32), np.zeros(2, np.int32)
    run_op(context, "topk", [tensor(x), tensor(values), tensor(ids)], {"k": 3})
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2]]
    assert values.tolist() == [[5, 5, 5], [2, 2, 2]]
    run_op(context, "argmax", [tensor(x), tensor(best)], {})
    assert best.tolist() == [1, 0]


def test_page_table_of_a_single_op_is_checked(context: Context) -> None:
    k, position, starts = np.zeros((1, 2, 8), np.float32), i32(0), i32(0, 1)
    state = np.zeros(3 * 2 * 2 * 32 * 8, np.float32)
    states = CoreTensor(state.ctypes.data, 1, (3, 2, 8), 0, 1)
    for page in (-1, 3):
        table = np.full((1, 1, 1), page, np.int32)
        tensors = [tensor(k), tensor(k), states, tensor(position), tensor(starts), tensor(table)]
        with raises(InvalidArgumentError, param="page_tables"):
            run_op(context, "kv_append", tensors, {"group": 0})


# ---- weights


def quantized_rows(layout: int, rows: int, cols: int) -> native.QuantizedRows:
    """Random ones, at the ends of what each field may be too."""
    rng = np.random.default_rng(cols)
    scales = rng.standard_normal(rows).astype(np.float32)
    if layout == I8:
        return native.QuantizedRows(rng.integers(-128, 127, (rows, cols), np.int8, endpoint=True), scales)
    shape = (rows, -(-cols // 32))
    steps = rng.integers(1, 17, shape, np.int8, endpoint=True)
    offsets = np.floor(rng.random(shape) * (256.0 - 15 * steps.astype(np.float64)) - 128).astype(np.int8)
    steps[0, 0], offsets[0, 0] = 17, -128
    steps[1, 0], offsets[1, 0] = 1, 112
    q = rng.integers(0, 15, (rows, cols), np.int8, endpoint=True)
    return native.QuantizedRows(q, scales, np.stack((steps, offsets), axis=2))


@pytest.mark.parametrize(("layout", "cols"), [(I8, 70), (I8, 3), (I4G32, 70), (I4G32, 32), (I4G32, 97), (I4G32, 64)])
def test_quantized_values_survive_packing(layout: int, cols: int, context: Context) -> None:
    values = quantized_rows(layout, 37, cols)
    packed = np.zeros(native.layout_bytes(layout, 37, cols), np.uint8)
    for start in (16, 0):  # rows in two calls, not in order
        end = 37 if start else 16
        piece = native.QuantizedRows(*(None if part is None else part[start:end].copy() for part in values))
        native.pack_quantized(context, layout, 37, cols, start, end - start, piece, packed)
    found = native.unpack_quantized(context, layout, 37, cols, 0, 37, packed)
    for name, expected in values._asdict().items():
        assert np.array_equal(getattr(found, name), expected), name
    integers = values.q.astype(np.int32)
    if values.groups is not None:
        lines = np.repeat(values.groups.astype(np.int32), 32, axis=1)[:, :cols]
        integers = lines[..., 0] * integers + lines[..., 1]
    expected = integers.astype(np.float32) * values.scales[:, None]
    assert (native.unpack(context, layout, 37, cols, 0, 37, packed) == expected).all()


def test_four_bit_layout_lies_as_the_format_says(context: Context) -> None:
    """docs/explanation/bundle-format.md, byte by byte."""
    values = quantized_rows(I4G32, 20, 150)
    assert values.groups is not None
    packed = np.zeros(native.layout_bytes(I4G32, 20, 150), np.uint8)
    assert len(packed) == 2 * (64 + 3 * 576)
    native.pack_quantized(context, I4G32, 20, 150, 0, 20, values, packed)
    for row, column in ((0, 0), (3, 17), (15, 31), (16, 32), (19, 149), (7, 127), (18, 79)):
        tile, pair, group, at = packed[row // 16 * 1792 :], column // 64, column // 32 % 2, column % 32
        lane, base = row % 16, 64 + column // 64 * 576
        assert tile[4 * lane : 4 * lane + 4].view(np.float32)[0] == values.scales[row]
        line = tile[base + 4 * lane + 2 * group :][:2].view(np.int8)
        assert line.tolist() == values.groups[row, 2 * pair + group].tolist()
        byte = int(tile[base + 64 + 256 * group + at % 16 // 4 * 64 + 4 * lane + at % 4])
        assert (byte & 15 if at < 16 else byte >> 4) == values.q[row, column]


def test_four_bit_search_is_near_the_best_line(context: Context) -> None:
    """Against every step and every offset, in groups of one row each."""
    source = np.random.default_rng(5).standard_normal((24, 32)).astype(np.float32)
    packed = np.zeros(native.layout_bytes(I4G32, 24, 32), np.uint8)
    native.pack(context, I4G32, 24, 32, 0, 24, 1, source, packed)
    found = native.unpack(context, I4G32, 24, 32, 0, 24, packed)
    best = []
    for row in source.astype(np.float64):
        unit = np.abs(row).max() / 127
        steps, offsets = np.meshgrid(np.arange(1, 18), np.arange(-128, 128), indexing="ij")
        tops = np.minimum(15, (127 - offsets) // steps)[..., None]
        q = np.clip(np.round((row / unit - offsets[..., None]) / steps[..., None]), 0, tops)
        errors = ((q * steps[..., None] + offsets[..., None] - row / unit) ** 2).sum(axis=2)
        best.append(errors.min() * unit**2)
    assert ((found - source) ** 2).sum() < 1.05 * np.sum(best)


def test_values_that_cannot_be_packed_are_refused_by_row(context: Context) -> None:
    packed = np.zeros(native.layout_bytes(I8, 2, 4), np.uint8)
    source = np.ones((2, 4), np.float32)
    source[1, 2] = np.nan
    with raises(InvalidArgumentError, param="src"):
        native.pack(context, I8, 2, 4, 0, 2, 1, source, packed)
    values = native.QuantizedRows(np.full((2, 4), -128, np.int8), np.array([1, np.nan], np.float32))
    with raises(InvalidArgumentError, param="scales"):
        native.pack_quantized(context, I8, 2, 4, 0, 2, values, packed)
    with raises(InvalidArgumentError, param="row_start"):
        native.pack(
            context, I8, 2, 4, 1, 2, 1, np.ones((2, 4), np.float32), np.zeros(native.layout_bytes(I8, 2, 4), np.uint8)
        )
    with raises(InvalidArgumentError, param="dst"):
        native.pack(context, I8, 2, 4, 0, 2, 1, np.ones((2, 4), np.float32), np.zeros(4, np.uint8))


@pytest.mark.parametrize("change", ["step", "low step", "nibble", "low nibble", "value", "scale", "groups", "none"])
def test_bad_lines_are_refused_by_row(change: str, context: Context) -> None:
    values = quantized_rows(I4G32, 5, 70)
    assert values.groups is not None
    packed = np.zeros(native.layout_bytes(I4G32, 5, 70), np.uint8)
    param, message = "q", "nibbles, .* 1 to 17, .* -128 to 127 .* scales, .* row 3"
    if "step" in change:
        values.groups[3, 2, 0] = 0 if change == "low step" else 18
    elif "nibble" in change:
        values.q[3, 69] = -1 if change == "low nibble" else 16
    elif change == "value":
        values.groups[3, 2], values.q[3, 64:] = (9, 120), 1
    elif change == "scale":
        values.scales[3] = np.inf
    elif change == "groups":
        values, param, message = values._replace(groups=values.groups[:, :2].copy()), "groups", "30 bytes, got 20"
    else:
        values, param, message = values._replace(groups=None), "groups", "steps and offsets"
    with raises(InvalidArgumentError, param=param, match=message):
        native.pack_quantized(context, I4G32, 5, 70, 0, 5, values, packed)
    assert not packed.any()


def test_probes_measure_something(context: Context) -> None:
    assert native.probe_bandwidth(context, 1 << 22, 2) > 1e8
    for dtype in (1, 3, 4):
        assert native.probe_compute(context, dtype, 0.005) > 1e7
    with raises(InvalidArgumentError, param="dtype"):
        native.probe_compute(context, 5)
