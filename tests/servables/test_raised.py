"""Anything that a stage raises or returns ends in a response, and its process keeps running."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.api_errors import RefusalError
from penstock.errors import InvalidFileError
from penstock.servables.api.specs import parse_spec
from penstock.servables.process.failures import InvalidResultError, failure_of
from penstock.servables.process.unit_program import to_spec_array
from tests.support.servable_folders import Host, pids, request, run, serving, write

RAISING = """
    class Mute(Exception):
        def __str__(self): raise RuntimeError("no text")

    class MuteInput(servable.InputError):
        def __str__(self): raise RuntimeError("no text")

    class Odd:
        def __index__(self): raise RuntimeError("no number")

    RAISED = [
        servable.InputError("file \\udcff"), ValueError("file \\udcff"), Mute(), MuteInput("it"),
        *(servable.InputError("no", instance=one) for one in (
            2, np.int64(2), np.uint8(2), np.array(2), 2**40, 2**31, -1, 3, 4, 2.0, "2", Odd(),
        )),
    ]

    @servable.stage(outputs={"y": "FP32[]"}, batch_size=8, padded_sizes=(8,))
    def together(x):
        raise RAISED[int(x[0])]

    @servable.stage(outputs={"y": "FP32[]"})
    def alone(x):
        if x >= 0: raise RAISED[int(x)]
        return x

    @servable.method(inputs={"x": "FP32[]"}, outputs={"y": "FP32[]"})
    def batch(x):
        return together(x)

    @servable.method(inputs={"x": "FP32[]"}, outputs={"y": "FP32[]"})
    def each(x):
        return alone(x)
"""
TOLD = [
    (400, "{stage}{at}: file \\udcff"), (500, "stage {stage} failed{at}: ValueError; see the log for details"),
    (500, "stage {stage} failed{at}: Mute; see the log for details"), (400, "{stage}{at}: MuteInput"),
]  # fmt: skip


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    root = tmp_path_factory.mktemp("servables")
    write(root, "raising", RAISING)
    found = Host(root)
    yield found
    found.close()


def refused(host: Host, method: str, *x: float) -> RefusalError:
    before = pids(host.servables)
    with pytest.raises(RefusalError) as told:
        host.ask(f"raising.{method}", x=np.array(x, np.float32))
    assert pids(host.servables) == before
    return told.value


@pytest.mark.parametrize("kind", range(len(TOLD)))
def test_errors_may_contain_any_text(host: Host, kind: int) -> None:
    status, text = TOLD[kind]
    for error, stage, at in (
        (refused(host, "batch", kind), "together", ""),
        (refused(host, "each", -1, kind), "alone", ", instance 1"),
    ):
        assert (error.status, str(error)) == (status, text.format(stage=stage, at=at))


@pytest.mark.parametrize("kind", range(4, 16))
def test_only_valid_instance_indexes_are_reported(host: Host, kind: int) -> None:
    """Of three, padded to eight: 2 in any form is the third, all else is none that was sent."""
    error = refused(host, "batch", kind, 0, 0)
    assert (error.status, str(error)) == (400, f"together{', instance 2' if kind < 8 else ''}: no")


def test_traceback_length_is_limited() -> None:
    class VeryLongError(Exception):
        pass

    VeryLongError.__name__ = "x" * 1000
    found = failure_of(VeryLongError("y" * 100_000), "it", 1)
    assert (len(found.text), len(found.trace), found.instance) == (100, 4000, -1)


def test_load_errors_may_contain_any_text(tmp_path: Path) -> None:
    write(tmp_path, "it", 'raise ValueError("file \\udcff")')

    async def work() -> None:
        async with serving(tmp_path):
            pass

    with pytest.raises(InvalidFileError, match=r"servable\.py:4: ValueError: file \\udcff"):
        run(work)


@pytest.mark.parametrize(
    ("spec", "value", "message"),
    [
        ("FP16[]", np.float64(1e9), r"^y .*1e\+09, .*FP16"),
        ("FP16[2]", np.array([1.0, -70_000.0]), "^y .*-70000, .*FP16"),
        ("FP16[]", 70_000, "^y .* 70000, .*FP16"),
        ("FP32[]", np.float64(1e300), r"^y .*1e\+300, .*FP32"),
        ("FP32[]", "abc", "FP32, got text .numpy <U3"),
        ("FP32[]", b"abc", "FP32, got bytes .numpy .S3"),
        ("FP32[]", None, "^y: .*FP32, got None"),
        ("FP32[2]", [1.0, None], "FP32, got an array .*None"),
        ("FP32[]", {"a": 1}, "FP32, got dict"),
        ("FP32[]", 1j, "FP32, got complex128"),
        ("INT64[]", 2**70, "INT64, got an array .*int"),
        ("INT64[-1]", np.empty(0, object), "INT64, got object"),
        ("INT64[]", np.datetime64("2026-01-01"), r"INT64, got datetime64\[D\]"),
        ("TEXT[]", None, "TEXT, got None"),
        ("TEXT[2]", ["a", None], "TEXT, got an array .*None"),
    ],
)
def test_results_of_the_wrong_type_are_refused(spec: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidResultError, match=message):
        to_spec_array(value, parse_spec(spec, "y"), None, "y")


def test_infinite_results_stay_infinite() -> None:
    given = np.array([np.inf, -np.inf, np.nan, 65_504.0])
    found = to_spec_array(given, parse_spec("FP16[4]", "y"), None, "y")
    assert np.array_equal(found, given, equal_nan=True)


def test_later_requests_are_unaffected(host: Host) -> None:
    method = host.servables.find("raising.each")
    assert host.do(method.infer(request({"x": np.array([-1.0])}))).outputs[0].array.tolist() == [-1]
