"""Weights copied into huge pages: the same bits, memory that holds them once, and no copy of a file that changed."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.core.layouts import KV_NUMBERS
from penstock.core.native import Context, CoreProgram, Model
from penstock.errors import InvalidArgumentError, InvalidFileError, OutOfMemoryError
from penstock.graph.ir import KvLayout
from penstock.runtime import native
from penstock.runtime.machine import Memory, huge_pages
from penstock.runtime.native import NativeProgram
from penstock.runtime.program import ProgramLimits
from tests.support import tiny_graph as tiny
from tests.support.command import DEMO, environment
from tests.support.core_steps import OPTIONS, batch
from tests.support.errors import raises
from tests.support.tiny_graph import write_bundle

REQUEST = [(0, list(range(40)), (3, 7))]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of about 50 MB of weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "VOCAB", 200_000)
        return write_bundle(tmp_path_factory.mktemp("large") / "large.psm", tiny.tiny_graph())


def logits_of(model: Model, context: Context) -> bytes:
    with CoreProgram(model, context, OPTIONS) as program:
        program.run(batch(REQUEST))
        return program.logits().tobytes()


@pytest.mark.parametrize("scheme", ["f32", "w8a8", "w4a8"])
def test_copied_weights_give_the_same_bits(scheme: str, bundle_of: Callable[..., Path], context: Context) -> None:
    with Model.open(bundle_of(scheme)) as mapped, Model.open(bundle_of(scheme)) as copied:
        expected = logits_of(copied, context)
        config = copied.segment("config.json")
        for _ in range(2):  # the second time it is there already
            copied.load_huge(context)
            assert logits_of(copied, context) == expected == logits_of(mapped, context)
        assert config == copied.segment("config.json") == b"{}"


def test_a_program_of_before_stays_sound(bundle_of: Callable[..., Path], context: Context) -> None:
    with Model.open(bundle_of()) as model, CoreProgram(model, context, OPTIONS) as program:
        model.load_huge(context)
        program.run(batch(REQUEST))
        assert program.logits().tobytes() == logits_of(model, context)


def test_a_file_read_whole_has_nothing_to_copy(bundle_of: Callable[..., Path], context: Context) -> None:
    with Model.open(bundle_of(), mmap=False) as model, Model.open(bundle_of()) as mapped:
        model.load_huge(context)
        assert logits_of(model, context) == logits_of(mapped, context)


MEMORY = """
import sys
from penstock.core.native import Context, Model
from penstock.runtime import native
from penstock.runtime.machine import _fields, peak_rss_bytes
from pathlib import Path
with Context(int(sys.argv[2])) as context, Model.open(sys.argv[1]) as model:
    before = peak_rss_bytes()
    model.load_huge(context)
    rollup = _fields(Path("/proc/self/smaps_rollup"))
    print(model.info.weight_bytes, peak_rss_bytes() - before, rollup["AnonHugePages"])
"""


@pytest.mark.parametrize("threads", [1, 3])
def test_memory_holds_the_weights_once_in_huge_pages(threads: int, large: Path) -> None:
    command = [sys.executable, "-c", MEMORY, str(large), str(threads)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    weight_bytes, peak, huge = map(int, done.stdout.split())
    assert weight_bytes > 40e6
    assert weight_bytes <= peak <= weight_bytes + (4 << 20)
    assert (huge >= weight_bytes // 2) == (huge_pages() in ("always", "madvise"))


def resident_pages(path: Path) -> int:
    """Pages of a file that the page cache holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapping:
        view = np.frombuffer(mapping, np.uint8)
        address = ctypes.c_void_p(view.ctypes.data)
        if libc.mincore(address, ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        del view
    return int((pages & 1).sum())


def test_the_page_cache_is_dropped_behind(large: Path, context: Context) -> None:
    large.read_bytes()
    total = resident_pages(large)
    with Model.open(large, verify=True) as model:  # maps every page
        assert total == -(-large.stat().st_size // mmap.PAGESIZE)
        model.load_huge(context)
        assert resident_pages(large) < total // 10


def test_key_layouts_have_the_numbers_of_the_graph() -> None:
    assert {name.upper(): number for name, number in KV_NUMBERS.items()} == KvLayout.__members__


def test_a_file_that_shrank_or_changed_is_an_error(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "model.psm"
    whole = bundle_of().read_bytes()
    for change, message in (
        (lambda: os.truncate(path, len(whole) - 4096), "it shrank while it was read"),
        (lambda: os.utime(path, ns=(1, 1)), "it changed while it was read"),
        (lambda: os.truncate(path, len(whole) + 1), "it changed while it was read"),
    ):
        path.write_bytes(whole)
        with Context(2) as context, Model.open(path) as model:
            change()
            with pytest.raises(InvalidFileError, match=f"weights huge: file: {message}"):
                model.load_huge(context)
            assert model.segment("absent") is None


def test_a_file_that_lost_its_name_is_copied(bundle_of: Callable[..., Path], tmp_path: Path, context: Context) -> None:
    path = tmp_path / "model.psm"
    path.write_bytes(bundle_of().read_bytes())
    with Model.open(path) as model, Model.open(bundle_of()) as other:
        path.unlink()
        model.load_huge(context)
        assert logits_of(model, context) == logits_of(other, context)


def test_a_closed_model_is_refused(bundle_of: Callable[..., Path]) -> None:
    with Context(1) as context:
        model = Model.open(bundle_of())
        model.close()
        with raises(InvalidArgumentError, code="closed"):
            model.load_huge(context)


def test_weights_that_do_not_fit_are_refused_before_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(native, "memory", lambda: Memory(70 << 20, 1 << 40, None))
    monkeypatch.setattr(Model, "load_huge", never)
    with raises(OutOfMemoryError, code="out_of_memory", match=r"70 MiB .* 5 MiB"):
        NativeProgram.open(DEMO, limits=ProgramLimits(weights="huge"))


def test_only_the_weights_that_exist_are_options() -> None:
    with raises(InvalidArgumentError, param="weights", match="mmap, huge, got 'locked'"):
        ProgramLimits(weights="locked")
