"""Contexts, levels, threads, errors, single ops."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.lite import core
from penstock.lite.core import Context, CoreProgram, CoreTensor, Model, cpu_levels, op_schemas, run_op
from penstock.ops.table import OPS
from tests.core.steps import OPTIONS, batch, i32


def test_op_tables_of_core_and_package_are_equal() -> None:
    assert op_schemas() == [f"{op.name}.{op.version} {op.schema}" for op in OPS]


def test_levels_are_known_and_generic_runs_everywhere() -> None:
    levels = dict(cpu_levels())
    assert levels["generic"]
    assert set(levels) <= {"generic", "avx2", "avx512", "neon"}
    best = next(name for name, runnable in cpu_levels() if runnable)
    with Context(1) as context:
        assert context.cpu_level == os.environ.get("PENSTOCK_CPU", best)


def test_level_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CPU", "generic")
    with Context(1) as context:
        assert context.cpu_level == "generic"
    with Context(1, cpu_levels()[0][0]) as context:  # an option beats the environment
        assert context.cpu_level == cpu_levels()[0][0]


def test_unknown_level_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r'cpu_level: expected one of .*generic, found "avx9"'):
        Context(1, "avx9")


@pytest.mark.parametrize("num_threads", [-1, 1025])
def test_impossible_threads_are_refused(num_threads: int) -> None:
    with pytest.raises(InvalidArgumentError, match="num_threads: expected 0"):
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
    with pytest.raises(InvalidArgumentError, match="CoreProgram is closed"):
        program.logits()
    model.close()
    with pytest.raises(InvalidArgumentError, match="Model is closed"):
        _ = model.info
    context.close()
    with pytest.raises(InvalidArgumentError, match="Context is closed"):
        _ = context.num_threads


def test_a_program_is_not_asked_once_its_model_is_closed(bundle_of: Callable[..., Path]) -> None:
    with Model.open(bundle_of()) as model, Context(1) as context:
        program = CoreProgram(model, context, OPTIONS)
    for use in (program.logits, lambda: program.kv(0)):
        with pytest.raises(InvalidArgumentError, match="Model is closed"):
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
    with CoreProgram(model, context, OPTIONS) as program, pytest.raises(InvalidArgumentError, match="expected a step"):
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
    wrong: list[tuple[str, list[CoreTensor | None], dict[str, float | str], str]] = [
        ("add", [tensor(X), tensor(Y)], {}, r"add: num_tensors: expected 3 .*found 2"),
        ("add", [tensor(X), tensor(long), tensor(Y)], {}, r"add: second argument: expected f32 \[2, 3\]"),
        ("add", [tensor(X), tensor(X), tensor(long)], {}, r"add: output 0: expected f32 \[2, 3\], found f32 \[3, 3\]"),
        ("add", [tensor(X), None, tensor(Y)], {}, "add: b: expected data, found null"),
        ("add", [tensor(X), tensor(X), tensor(Y)], {"eps": 1.0}, "add: eps: not an attribute of add"),
        ("gelu", [tensor(X), tensor(Y)], {}, "gelu: approximate: the attribute is missing"),
        ("gelu", [tensor(X), tensor(Y)], {"approximate": "erf"}, 'gelu: approximate: expected "none" or "tanh"'),
        ("gather_rows", [tensor(X), tensor(HIGH), tensor(Y)], {}, "gather_rows: rows: expected indices below"),
        ("gather_rows", [tensor(X), tensor(LOW), tensor(Y)], {}, "gather_rows: rows: expected indices below"),
        ("topk", [tensor(X), tensor(Y), tensor(Y)], {"k": 4}, "topk: k: expected 1 to 3, found 4"),
    ]
    for op, tensors, attrs, message in wrong:
        with pytest.raises(InvalidArgumentError, match=message):
            run_op(context, op, tensors, attrs)
    with pytest.raises(UnsupportedError, match='op: "convolve" is not in the op table'):
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
        with pytest.raises(
            InvalidArgumentError, match=r"kv_append: page_tables\[0\]\[0\]\[0\]: expected a page from 0 to 2"
        ):
            run_op(context, "kv_append", tensors, {"group": 0})


# ---- weights


@pytest.mark.parametrize(("layout", "cols"), [(19, 70), (19, 3), (20, 70), (20, 32)])
def test_quantized_values_survive_packing(layout: int, cols: int, context: Context) -> None:
    rng = np.random.default_rng(layout)
    low, high = (-127, 127) if layout == 19 else (-8, 7)
    q = rng.integers(low, high, (37, cols), np.int8, endpoint=True)
    shape = (37,) if layout == 19 else (37, -(-cols // 32))
    scales = rng.standard_normal(shape).astype(np.float16).astype(np.float32)
    packed = np.zeros(core.layout_bytes(layout, 37, cols), np.uint8)
    for start in (16, 0):  # rows in two calls, not in order
        end = 37 if start else 16
        rows = (layout, 37, cols, start, end - start)
        core.pack_quantized(context, *rows, q[start:end].copy(), scales[start:end].copy(), packed)
    found_q, found_scales = core.unpack_quantized(context, layout, 37, cols, 0, 37, packed)
    assert (found_q == q).all()
    assert (found_scales == scales).all()
    wide = np.repeat(scales.reshape(37, -1), 1 if layout == 20 else cols, axis=1)
    wide = wide if layout == 19 else np.repeat(wide, 32, axis=1)[:, :cols]
    assert (core.unpack(context, layout, 37, cols, 0, 37, packed) == q * wide).all()


def test_what_cannot_be_packed_is_refused_by_row(context: Context) -> None:
    packed = np.zeros(core.layout_bytes(19, 2, 4), np.uint8)
    source = np.ones((2, 4), np.float32)
    source[1, 2] = np.nan
    with pytest.raises(InvalidArgumentError, match="src: row 1 holds NaN or infinity"):
        core.pack(context, 19, 2, 4, 0, 2, 1, source, packed)
    q, scales = np.full((2, 4), -128, np.int8), np.ones(2, np.float32)
    with pytest.raises(InvalidArgumentError, match=r"q, scales: expected values of -127 to 127 .* row 0"):
        core.pack_quantized(context, 19, 2, 4, 0, 2, q, scales, packed)
    packed = np.zeros(core.layout_bytes(20, 1, 32), np.uint8)
    with pytest.raises(InvalidArgumentError, match="that f16 holds exactly, found others in row 0"):
        core.pack_quantized(
            context, 20, 1, 32, 0, 1, np.zeros((1, 32), np.int8), np.full((1, 1), 0.1, np.float32), packed
        )
    with pytest.raises(InvalidArgumentError, match="row_start, num_rows: expected a range within 2 rows"):
        core.pack(
            context, 19, 2, 4, 1, 2, 1, np.ones((2, 4), np.float32), np.zeros(core.layout_bytes(19, 2, 4), np.uint8)
        )
    with pytest.raises(InvalidArgumentError, match="dst: expected 192 bytes, found 4"):
        core.pack(context, 19, 2, 4, 0, 2, 1, np.ones((2, 4), np.float32), np.zeros(4, np.uint8))


def test_probes_measure_something(context: Context) -> None:
    assert core.probe_bandwidth(context, 1 << 22, 2) > 1e8
    for dtype in (1, 3, 4):
        assert core.probe_compute(context, dtype, 0.005) > 1e7
    with pytest.raises(InvalidArgumentError, match="dtype: expected f32, bf16 or i8"):
        core.probe_compute(context, 5)
