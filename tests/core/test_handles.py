"""Handles of the C API in wrong hands, and programs whose limits change: by ctypes, as any caller may."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.core.library import ContextOptions, ModelInfoStruct, ModelOptions, check, library, sized
from penstock.core.native import CoreProgram, Model
from penstock.errors import InvalidArgumentError
from tests.support.core_steps import OPTIONS, PROMPT, batch
from tests.support.errors import raises
from tests.support.tiny_graph import VOCAB

Handle = ctypes.c_void_p


def opened(path: Path) -> tuple[Handle, Handle]:
    context, model = Handle(), Handle()
    check(library().ps_context_create(ctypes.byref(sized(ContextOptions, num_threads=2)), ctypes.byref(context)))
    check(library().ps_model_open(str(path).encode(), ctypes.byref(sized(ModelOptions)), ctypes.byref(model)))
    return context, model


def describe(model: Handle | int | None) -> None:
    check(library().ps_model_describe(model, ctypes.byref(sized(ModelInfoStruct))))


def test_closed_null_and_foreign_handles_are_refused(bundle_of: Callable[..., Path]) -> None:
    context, model = opened(bundle_of())
    describe(model)
    with raises(InvalidArgumentError, param="model"):
        describe(None)
    with raises(InvalidArgumentError, param="model"):
        describe(context)
    with raises(InvalidArgumentError, param="model"):
        describe(4096)
    library().ps_model_close(model)
    library().ps_model_close(model)  # nothing happens
    with raises(InvalidArgumentError, param="model"):
        describe(model)
    library().ps_context_destroy(context)
    assert library().ps_context_num_threads(context) == 0
    assert library().ps_context_cpu_level(context) is None


def test_a_closed_handle_never_comes_again(bundle_of: Callable[..., Path]) -> None:
    """A newer object in its place, in memory or in the table, is not what it stands for."""
    closed = []
    for _ in range(200):
        context, model = opened(bundle_of())
        library().ps_model_close(model)
        library().ps_context_destroy(context)
        closed.append(model.value)
    context, model = opened(bundle_of())
    assert len({*closed, model.value}) == 201
    for old in closed:
        with raises(InvalidArgumentError, param="model"):
            describe(old)
    library().ps_model_close(closed[0])  # does not close the newer one
    describe(model)
    library().ps_model_close(model)
    library().ps_context_destroy(context)


def test_many_handles_are_known_at_once(bundle_of: Callable[..., Path]) -> None:
    made = [opened(bundle_of()) for _ in range(80)]  # more than a chunk of slots
    for _, model in made:
        describe(model)
    for context, model in made:
        library().ps_model_close(model)
        library().ps_context_destroy(context)
    with pytest.raises(InvalidArgumentError):
        describe(made[40][1])


def logits_of(program: CoreProgram, tokens: list[int], at: int) -> bytes:
    program.run(batch([(at, tokens, (1, 2))]))
    return program.logits().tobytes()


def resize(program: CoreProgram, **changes: int) -> None:
    from penstock.core.native import _options_struct

    struct = _options_struct(dataclasses.replace(OPTIONS, **changes))
    check(library().ps_program_resize(program.handle, ctypes.byref(struct)))


def test_resized_program_keeps_its_pages(model: Model, bundle_of: Callable[..., Path]) -> None:
    from penstock.core.native import Context

    with Context(2) as context:
        with CoreProgram(model, context, OPTIONS) as whole:
            wanted = logits_of(whole, PROMPT, 0)
        with CoreProgram(model, context, OPTIONS) as program:
            first = logits_of(program, PROMPT[:30], 0)
            resize(program, max_tokens=20, num_pages=OPTIONS.num_pages + 5)
            with raises(InvalidArgumentError, param="program"):
                program.logits()
            with raises(InvalidArgumentError, param="num_tokens"):
                program.run(batch([(0, PROMPT[:30], (1, 2))]))
            assert first + logits_of(program, PROMPT[30:], 30) == wanted


def test_resize_that_fails_leaves_the_program(model: Model) -> None:
    from penstock.core.native import Context

    with Context(1) as context, CoreProgram(model, context, OPTIONS) as program:
        wanted = logits_of(program, PROMPT, 0)
        for param, value in (("max_tokens", 0), ("num_pages", 0), ("kv_layout", 3)):
            with raises(InvalidArgumentError, param=param):
                resize(program, **{param: value})
        assert np.frombuffer(logits_of(program, PROMPT, 0), np.float32).shape == (len(PROMPT) * VOCAB,)
        assert logits_of(program, PROMPT, 0) == wanted


def test_program_outlives_what_it_was_made_of(bundle_of: Callable[..., Path]) -> None:
    from penstock.core.library import BatchStruct
    from penstock.core.native import _options_struct

    context, model = opened(bundle_of())
    out = Handle()
    check(library().ps_program_create(model, context, ctypes.byref(_options_struct(OPTIONS)), ctypes.byref(out)))
    library().ps_model_close(model)
    library().ps_context_destroy(context)
    ids = (ctypes.c_int32 * 2)(1, 2)
    positions, starts, rows = (ctypes.c_int32 * 2)(0, 1), (ctypes.c_int32 * 2)(0, 2), (ctypes.c_int32 * 1)(1)
    tables = (ctypes.c_int32 * 1)(0)
    arrays = [ctypes.cast(array, Handle) for array in (ids, positions, starts, tables, rows)]
    names = ("token_ids", "positions", "request_starts", "page_tables", "output_rows")
    step = sized(BatchStruct, num_tokens=2, num_requests=1, num_rows=1, page_table_width=1)
    for name, array in zip(names, arrays, strict=True):
        setattr(step, name, array)
    check(library().ps_program_run(out, ctypes.byref(step)))
    library().ps_program_destroy(out)
    with raises(InvalidArgumentError, param="program"):
        check(library().ps_program_run(out, ctypes.byref(step)))
