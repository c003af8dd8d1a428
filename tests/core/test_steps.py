"""Steps through a program: the same bits whatever the memory, and batches that are wrong refused by field."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.core.library import PlanStruct, check, library, sized
from penstock.core.native import (
    ALL_THREADS,
    EMPTY_KERNELS,
    INPUT_SUMS,
    POISON,
    Context,
    CoreProgram,
    Model,
    StepBatch,
    _options_struct,
    cpu_levels,
    plan,
)
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.ir import DType, Graph, Value
from tests.support.core_steps import OPTIONS, PROMPT, batch, i32, sampling
from tests.support.errors import raises
from tests.support.tiny_graph import FFN, LINEAR_LAYOUTS, VOCAB, T, c, stateless_graph, tiny_graph, value, write_bundle

LEVELS = [name for name, runnable in cpu_levels() if runnable]


def run_chunks(program: CoreProgram, chunks: list[int], pages: tuple[int, ...] = (3, 7)) -> npt.NDArray[np.float32]:
    """Logits of PROMPT run in chunks of these lengths."""
    rows, at = [], 0
    groups = len(program._model.info.page_windows)
    for size in chunks:
        program.run(batch([(at, PROMPT[at : at + size], pages)], groups))
        rows.append(program.logits().copy())
        at += size
    return np.concatenate(rows)


@pytest.mark.parametrize("scheme", LINEAR_LAYOUTS)
def test_logits_are_bit_equal_on_any_level_threads_and_chunks(scheme: str, bundle_of: Callable[..., Path]) -> None:
    found: dict[str, set[bytes]] = {}
    with Model.open(bundle_of(scheme, (0, 32))) as model:
        for level in LEVELS:
            # Dot products of bf16 are a level's own.
            own = found.setdefault(level if scheme == "bf16" else "any", set())
            for threads in (1, 2, 5):
                with Context(threads, level) as context, CoreProgram(model, context, OPTIONS) as program:
                    logits = run_chunks(program, [40] if threads != 2 else [1, 7, 31, 1])
                    assert np.isfinite(logits).all()
                    own.add(logits.tobytes())
    assert {level: len(results) for level, results in found.items()} == dict.fromkeys(found, 1)


@pytest.mark.parametrize("scheme", ["f32", "bf16", "w8a8", "w4a8"])
def test_gate_and_up_of_three_dimensions_are_multiplied_whole(
    scheme: str, bundle_of: Callable[..., Path], tmp_path: Path
) -> None:
    def in_heads(graph: Graph) -> None:
        for node in [node for node in graph.nodes if node.op == "silu_mul"]:
            for name in (*(operand.name for operand in node.inputs), *node.outputs):
                graph.values[name] = dataclasses.replace(graph.values[name], shape=(T, c(4), c(FFN // 4)))
            flat = f"{node.name}.flat"
            graph.values[flat] = Value(flat, DType.F32, (T, c(FFN)), node.outputs[0])
            next(after for after in graph.nodes if after.name == f"{node.name}.down").inputs[0] = value(flat)

    found = []
    options = dataclasses.replace(OPTIONS, flags=POISON | ALL_THREADS)
    for path in (bundle_of(scheme), write_bundle(tmp_path / "heads.psm", tiny_graph(scheme), patch=in_heads)):
        with Model.open(path) as model, Context(2) as context, CoreProgram(model, context, options) as program:
            found.append(run_chunks(program, [40]).tobytes())
    assert found[0] == found[1]


def test_short_steps_on_one_thread_match_all_threads(bundle_of: Callable[..., Path]) -> None:
    with Model.open(bundle_of("f32")) as model, Context(3) as context:
        results = []
        for flags in (0, ALL_THREADS):
            with CoreProgram(model, context, dataclasses.replace(OPTIONS, flags=flags)) as program:
                results.append(run_chunks(program, [5, 1, 30, 4]).tobytes())
        assert results[0] == results[1]


@pytest.mark.parametrize("kv_layout", [1, 2, 3, 4])
def test_poisoned_temporaries_do_not_change_logits(
    kv_layout: int, bundle_of: Callable[..., Path], context: Context
) -> None:
    with Model.open(bundle_of("w4a8")) as model:
        results = []
        for flags in (ALL_THREADS, ALL_THREADS | POISON):
            options = dataclasses.replace(OPTIONS, flags=flags, kv_layout=kv_layout)
            with CoreProgram(model, context, options) as program:
                results.append(run_chunks(program, [5, 1, 30, 4]).tobytes())
        assert results[0] == results[1]


def test_random_steps_match_single_requests(bundle_of: Callable[..., Path], context: Context) -> None:
    rng = np.random.default_rng(11)
    with Model.open(bundle_of("w8a8")) as model, CoreProgram(model, context, OPTIONS) as program:
        alone = run_chunks(program, [40])
        done = [0, 0, 0]
        while min(done) < 40:
            work = [(i, min(int(rng.integers(0, 13)), 40 - done[i])) for i in range(3)]
            work = [(i, size) for i, size in work if size]
            if not work:
                continue
            program.run(batch([(done[i], PROMPT[done[i] : done[i] + n], (2 * i, 2 * i + 1)) for i, n in work]))
            logits, at = program.logits(), 0
            for i, n in work:
                assert logits[at : at + n].tobytes() == alone[done[i] : done[i] + n].tobytes()
                at, done[i] = at + n, done[i] + n


def test_programs_of_one_context_may_run_at_once(bundle_of: Callable[..., Path], context: Context) -> None:
    with Model.open(bundle_of("w8a8")) as model:
        programs = [CoreProgram(model, context, OPTIONS) for _ in range(3)]
        results: list[bytes] = []

        def work(program: CoreProgram) -> None:
            results.extend(run_chunks(program, [20, 20]).tobytes() for _ in range(20))

        threads = [threading.Thread(target=work, args=(program,)) for program in programs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for program in programs:
            program.close()
        assert len(results) == 60
        assert len(set(results)) == 1


def test_rows_of_logits_are_those_asked_for(model: Model, context: Context) -> None:
    with CoreProgram(model, context, OPTIONS) as program:
        whole = run_chunks(program, [40])
        program.run(batch([(0, PROMPT, (1, 2))], output_rows=i32(39, 0, 0)))
        assert program.logits().tobytes() == whole[[39, 0, 0]].tobytes()
        program.run(batch([(0, PROMPT, (1, 2))], output_rows=i32()))
        assert program.logits().shape == (0, VOCAB)


def test_empty_kernels_do_not_write_logits(model: Model, context: Context) -> None:
    with CoreProgram(model, context, dataclasses.replace(OPTIONS, flags=EMPTY_KERNELS | ALL_THREADS)) as program:
        assert not run_chunks(program, [40]).any()


def test_plan_says_what_a_program_takes(model: Model, context: Context) -> None:
    small = plan(model, context, OPTIONS)
    assert small.kv_bytes == OPTIONS.num_pages * small.kv_page_bytes == 16 * 2 * (2 * 32 * 8 * 4) * 2
    assert small.logits_bytes == 64 * VOCAB * 4
    parts = (small.weight_bytes, small.temporary_bytes, small.scratch_bytes, small.kv_bytes, small.logits_bytes)
    assert small.total_bytes == sum(parts)
    values = 64 * 4 * (32 + 64 + 32 + 16 + 8)  # what is alive at once is far less than all values together
    assert small.temporary_bytes < 3 * values
    with CoreProgram(model, context, OPTIONS) as program:
        assert program.kv(1).shape == (16, 2 * (2 * 32 * 8 * 4))


def test_kv_bytes_can_move_to_another_program(model: Model, context: Context) -> None:
    with CoreProgram(model, context, OPTIONS) as first, CoreProgram(model, context, OPTIONS) as second:
        whole = run_chunks(first, [40])
        run_chunks(first, [39])
        for state in range(2):
            second.kv(state)[:] = first.kv(state)
        second.run(batch([(39, PROMPT[39:], (3, 7))]))
        assert second.logits().tobytes() == whole[39:].tobytes()


def two(**changes: Any) -> StepBatch:
    """Requests of 3 tokens at 0 and 2 tokens at 33."""
    return batch([(0, [1, 2, 3], (4,)), (33, [5, 6], (8, 9))], **changes)


TABLES = np.array([[[4, -1], [8, 9]]], np.int32)


def tables(request: int, entry: int, page: int) -> npt.NDArray[np.int32]:
    changed = TABLES.copy()
    changed[0, request, entry] = page
    return changed


BATCHES: dict[str, tuple[dict[str, Any], str, str]] = {
    "token_high": ({"token_ids": i32(1, 2, 3, VOCAB, 6)}, "token_ids[3]", "expected less than the vocabulary of 101"),
    "slot_high": ({"token_ids": i32(1, 2, -4, 5, 6)}, "token_ids[2]", "expected .* one of 3 slots, got slot 3"),
    "slot_lowest": ({"token_ids": i32(-(2**31), 2, 3, 5, 6)}, "token_ids[0]", ".* got slot 2147483647"),
    "slot_empty": ({"token_ids": i32(-1, 2, 3, 5, 6)}, "token_ids[0]", "nothing was sampled in slot 0"),
    "position_negative": ({"positions": i32(-1, 0, 1, 33, 34)}, "positions[0]", "expected 0 to 255, got -1"),
    "position_high": ({"positions": i32(0, 1, 2, 255, 256)}, "positions[4]", "expected 0 to 255, got 256"),
    "position_gap": ({"positions": i32(0, 2, 3, 33, 34)}, "positions[1]", "expected 1, .* request 0, got 2"),
    "starts_first": ({"request_starts": i32(1, 3, 5)}, "request_starts[0]", "expected 0, got 1"),
    "starts_equal": ({"request_starts": i32(0, 0, 5)}, "request_starts[1]", "expected more than 0"),
    "starts_high": ({"request_starts": i32(0, 9, 5)}, "request_starts[1]", "expected more than 0 and at most 5"),
    "starts_last": ({"request_starts": i32(0, 3, 4)}, "request_starts[2]", "expected the number of tokens 5, got 4"),
    "row_negative": ({"output_rows": i32(-1)}, "output_rows[0]", "expected a token of the step, 0 to 4, got -1"),
    "row_high": ({"output_rows": i32(0, 5)}, "output_rows[1]", "expected a token of the step, 0 to 4, got 5"),
    "page_negative": ({"page_tables": tables(1, 0, -1)}, "page_tables[0][1][0]", "expected a page from 0 to 15"),
    "page_high": ({"page_tables": tables(1, 1, 16)}, "page_tables[0][1][1]", "expected .* 0 to 15, got 16"),
    "page_width": ({"page_tables": TABLES[:, :, :1].copy()}, "page_table_width", "expected at least 2 for position 34"),
    "page_shared_write": ({"page_tables": tables(1, 1, 4)}, "page_tables[0][1][1]", "page 4 is written by"),
    "page_shared_read": ({"page_tables": tables(1, 0, 4)}, "page_tables[0][1][0]", "page 4 is read here"),
    "page_own": ({"page_tables": tables(1, 0, 9)}, "page_tables[0][1][0]", "page 9 is read here and written"),
    "no_tokens": (
        {"token_ids": i32(), "positions": i32(), "output_rows": i32(), "request_starts": i32(0, 0, 0)},
        "num_tokens", "expected 1 to 64, got 0",
    ),
    "many_rows": ({"output_rows": np.zeros(65, np.int32)}, "num_rows", "expected 0 to 64, got 65"),
    "dtype": ({"token_ids": np.zeros(5, np.int64)}, "token_ids", r"expected C-contiguous int32 \[5\], got int64 \[5\]"),
    "groups": ({"page_tables": np.zeros((2, 2, 2), np.int32)}, "page_tables", r".* \[1, 2, 2\], got int32 \[2, 2, 2\]"),
    "strided": ({"positions": np.arange(10, dtype=np.int32)[::2]}, "positions", ".*not C-contiguous"),
    "list": ({"positions": [0, 1, 2, 33, 34]}, "positions", "expected a numpy array, got list"),
}  # fmt: skip


@pytest.mark.parametrize("case", BATCHES)
def test_a_wrong_batch_is_refused_by_field(case: str, model: Model, context: Context) -> None:
    changes, param, message = BATCHES[case]
    with CoreProgram(model, context, OPTIONS) as program:
        with raises(InvalidArgumentError, param=param, match=message):
            program.run(two(**changes))
        program.run(two())
        assert np.isfinite(program.logits()).all()


def test_a_window_lets_old_pages_go(bundle_of: Callable[..., Path], context: Context) -> None:
    with Model.open(bundle_of("f32", (32,))) as model, CoreProgram(model, context, OPTIONS) as program:
        kept, freed = batch([(70, [1], (1, 2, 3))]), batch([(70, [1], (-1, 2, 3))])
        program.run(kept)
        expected = program.logits().copy()
        program.run(freed)
        assert program.logits().tobytes() == expected.tobytes()
        with raises(InvalidArgumentError, param="page_tables"):
            program.run(batch([(62, [1], (1, -1, 3))]))


def test_a_page_group_has_its_own_number_of_pages(bundle_of: Callable[..., Path], context: Context) -> None:
    """The windowed group uses its three pages in turn; a page that it does not have is refused."""
    few = dataclasses.replace(OPTIONS, group_pages=(0, 3))
    tables = np.array([[[5, 9, 13, 15]], [[2, 0, 1, 2]]], np.int32)
    with Model.open(bundle_of("f32", (0, 32))) as model:
        found = []
        for options in (OPTIONS, few):
            with CoreProgram(model, context, options) as program:
                rows = []
                for at in range(0, 120, 30):
                    tokens = [(at + i) % 50 + 1 for i in range(30)]
                    program.run(batch([(at, tokens, (0,))], 2, page_tables=tables))
                    rows.append(program.logits().tobytes())
                found.append(rows)
                sizes = [program.kv(state).shape[0] for state in range(model.info.num_states)]
                assert set(sizes) == ({16} if options is OPTIONS else {16, 3})
                assert plan(model, context, options).kv_bytes == sum(program.kv(i).nbytes for i in range(len(sizes)))
                if options is few:
                    with raises(InvalidArgumentError, param="page_tables"):
                        program.run(batch([(0, [1], (3,))], 2))
        assert found[0] == found[1]
        for counts, param in (((0, 17), "group_pages[1]"), ((1,), "group_pages")):
            with raises(InvalidArgumentError, param=param):
                plan(model, context, dataclasses.replace(OPTIONS, group_pages=counts))


def test_a_step_call_reads_its_arrays_each_time(model: Model, context: Context) -> None:
    with CoreProgram(model, context, OPTIONS) as program:
        wanted = []
        for at, token in enumerate([7, 3, 9]):
            wanted.append(program.step(batch([(at, [token], (1,))]), sampling(1)).ids.tolist())
        step, found = batch([(0, [7], (2,))]), []
        call = program.step_call(step, sampling(1))
        for at, token in enumerate([7, 3, 9]):
            step.positions[0], step.token_ids[0] = at, token
            found.append(call().ids.tolist())
        assert found == wanted
    with raises(InvalidArgumentError, code="closed"):
        call()


def test_stateless_graph_needs_no_pages(context: Context, tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "stateless.psm", stateless_graph())
    found = []
    with Model.open(path) as model:
        for num_pages in (0, 16):
            options = dataclasses.replace(OPTIONS, num_pages=num_pages)
            with CoreProgram(model, context, options) as program:
                program.run(batch([(0, PROMPT, (0, 1)), (0, PROMPT[:3], (0,))]))
                found.append(program.logits().tobytes())
    assert found[0] == found[1]


def test_slots_feed_the_next_step(model: Model, context: Context) -> None:
    with CoreProgram(model, context, OPTIONS) as program:
        ids = program.step(batch([(0, [7], (1,))]), sampling(1, slot=i32(2))).ids
        program.run(batch([(1, [int(ids[0])], (1,))]))
        expected = program.logits().copy()
        program.run(batch([(1, [-3], (1,))]))
        assert program.logits().tobytes() == expected.tobytes()


LIMITS: dict[str, tuple[dict[str, int], type[Exception], str]] = {
    "max_tokens": ({"max_tokens": 0}, InvalidArgumentError, "max_tokens: expected 1 to 4096, got 0"),
    "max_tokens_high": ({"max_tokens": 4097}, InvalidArgumentError, "max_tokens: expected 1 to 4096, got 4097"),
    "max_requests": ({"max_requests": 0}, InvalidArgumentError, "max_requests: expected 1 to 256"),
    "max_rows": ({"max_rows": 0}, InvalidArgumentError, "max_rows: expected 1 to"),
    "num_pages": ({"num_pages": 0}, InvalidArgumentError, "num_pages: expected 1 to"),
    "negative": ({"num_slots": -1}, InvalidArgumentError, "num_slots: expected an integer from 0 to"),
    "kv_layout": (
        {"kv_layout": 5},
        InvalidArgumentError,
        r"kv_layout: expected 0 \(automatic\), 1 \(f32\), 2 \(bf16\), 3 \(int8\) or 4 \(int4\)",
    ),
}


@pytest.mark.parametrize("case", LIMITS)
def test_wrong_limits_are_refused_by_name(case: str, model: Model, context: Context) -> None:
    changes, error, message = LIMITS[case]
    options = dataclasses.replace(OPTIONS, **changes)
    with pytest.raises(error, match=message):
        plan(model, context, options)
    with pytest.raises(error, match=message):
        CoreProgram(model, context, options)


def test_flags_need_the_developer_api(model: Model, context: Context) -> None:
    with raises(UnsupportedError, param="flags"):
        CoreProgram(model, context, dataclasses.replace(OPTIONS, flags=16))
    core, out = library(), ctypes.c_void_p()
    for flags in (EMPTY_KERNELS, POISON, ALL_THREADS, INPUT_SUMS, 16):
        options = _options_struct(OPTIONS)
        options.flags = flags
        handles = model.handle, context.handle, ctypes.byref(options)
        for status in (
            lambda handles=handles: core.ps_program_plan(*handles, ctypes.byref(sized(PlanStruct))),
            lambda handles=handles: core.ps_program_create(*handles, ctypes.byref(out)),
            lambda handles=handles: core.ps_program_create_flagged(*handles, 0, ctypes.byref(out)),
        ):
            with raises(UnsupportedError, param="flags"):
                check(status())
    assert not out.value


def test_a_failed_allocation_raises_memory_error(model: Model, context: Context) -> None:
    with pytest.raises(MemoryError, match=r"^num_pages: .*system"):
        CoreProgram(model, context, dataclasses.replace(OPTIONS, num_pages=1 << 30))
