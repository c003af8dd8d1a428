"""Recording steps of a running service: no step fails because of it, and its memory has a bound."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from penstock.bench import live_profile
from penstock.bench.live_profile import StepRecorder, report_of
from penstock.core import spans

BATCH = SimpleNamespace(
    token_ids=[1], request_starts=np.array([0, 1]), positions=np.array([5]), page_tables=np.zeros(1), output_rows=[0]
)


def recorder_of(monkeypatch: pytest.MonkeyPatch, failing: str = "") -> tuple[StepRecorder, list[str]]:
    done: list[str] = []

    def set_profiling(_core: object, is_on: bool) -> None:
        if failing == f"set_profiling {is_on}":
            raise ValueError(failing)

    def last_spans(_core: object) -> np.ndarray:
        if failing == "last_spans":
            raise ValueError(failing)
        return np.zeros(10, np.int64)

    monkeypatch.setattr(spans, "set_profiling", set_profiling)
    monkeypatch.setattr(spans, "last_spans", last_spans)
    monkeypatch.setattr(live_profile, "_SHARE", 1e9)
    program = SimpleNamespace(core_program=None)
    return StepRecorder(program, 100, lambda: done.append("done")), done  # type: ignore[arg-type]


@pytest.mark.parametrize("failing", ["set_profiling True", "set_profiling False", "last_spans"])
def test_a_step_goes_on_if_recording_fails(monkeypatch, tmp_path, failing: str) -> None:
    recorder, done = recorder_of(monkeypatch, failing)
    assert [recorder.record(BATCH, lambda number=number: number) for number in range(3)] == [0, 1, 2]
    assert done == ["done"]
    (tmp_path / "bundle").touch()
    with pytest.raises(ValueError, match=failing):
        report_of(recorder, {"bundle": str(tmp_path / "bundle")})


def test_the_error_of_a_step_is_its_own(monkeypatch) -> None:
    recorder, done = recorder_of(monkeypatch)
    with pytest.raises(ZeroDivisionError):
        recorder.record(BATCH, lambda: 1 / 0)
    assert (recorder.error, done) == (None, [])


def test_the_memory_of_spans_and_times_has_a_bound(monkeypatch) -> None:
    recorder, done = recorder_of(monkeypatch)
    monkeypatch.setattr(live_profile, "_MAX_SPAN_BYTES", 200)
    for _ in range(5):
        recorder.record(BATCH, int)
    assert (len(recorder.recorded), done) == (3, ["done"])
    recorder, _ = recorder_of(monkeypatch)
    monkeypatch.setattr(live_profile, "_SHARE", -1.0)
    for _ in range(5):
        recorder.record(BATCH, int)
    assert [*recorder.plain] == ["decode"]
    assert recorder.plain["decode"][0] == 5
