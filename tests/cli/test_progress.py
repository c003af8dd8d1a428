"""Progress: a bar on a terminal, lines elsewhere, with the amounts, the rate and the time left."""

from __future__ import annotations

import io

import pytest

from penstock.cli import progress as progress_module
from penstock.cli.progress import ProgressLine, format_bytes, format_seconds
from penstock.runtime.build import Progress
from tests.support.command import DEMO, FOLDER
from tests.support.terminal import Terminal


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0012, "1.2 ms"), (0.034, "34 ms"), (0.9994, "999 ms"), (0.9999, "1.0 s"), (1.24, "1.2 s"), (38, "38 s"),
     (200, "3 min 20 s"), (7500, "2 h 5 min"), (0, "0 s")],
)  # fmt: skip
def test_times_have_units(seconds, text):
    assert format_seconds(seconds) == text


def test_sizes_have_units():
    assert [format_bytes(size) for size in (999, 12_300, 4_560_000_000)] == ["999 B", "12.3 kB", "4.56 GB"]


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(progress_module.time, "monotonic", lambda: self.now)


def test_a_pipe_gets_a_line_per_stage_and_per_half_minute(monkeypatch):
    clock, stream = Clock(monkeypatch), io.StringIO()
    with ProgressLine(stream) as line:
        line(Progress("capture"))
        for second in range(0, 70, 5):
            clock.now = second
            line(Progress("pack", second * 1_000_000, 100_000_000))
        line(Progress("answer", 0, 8, "requests"))
        clock.now = 200
        line(Progress("answer", 2, 8, "requests", "1 failed"))
    assert stream.getvalue().splitlines() == [
        "capturing the network",
        "packing weights (100 MB)",
        "packing weights 30% of 100 MB, 1.00 MB/s, 1 min 10 s left",
        "packing weights 60% of 100 MB, 1.00 MB/s, 40 s left",
        "answering (8 requests)",
        "answering 25% of 8 requests, 1 failed, 6 min 45 s left",
    ]


def test_work_for_each_rank_names_the_rank():
    stream = io.StringIO()
    with ProgressLine(stream) as line:
        for rank in range(2):
            line(Progress("pack", 0, 1_000_000, rank=rank))
            line(Progress("pack", 10, 1_000_000, rank=rank))
    assert stream.getvalue().splitlines() == [
        "packing weights of rank 0 (1.00 MB)",
        "packing weights of rank 1 (1.00 MB)",
    ]


@pytest.mark.long
def test_export_shows_a_bar_on_a_terminal_and_removes_it(tmp_path):
    out = tmp_path / "demo.psm"
    with Terminal("export", FOLDER, out, "--scheme", "w8a8") as terminal:
        terminal.until("capturing the network")
        seen = terminal.until(f"{out}: llama, w8a8")
        assert terminal.process.wait(timeout=300) == 0
    assert "packing weights" in seen
    assert "100% of" in seen
    assert "\x1b[?25l" not in seen  # the cursor stays visible
    assert "\x1b[2K" in seen  # the bar is gone


@pytest.mark.long
def test_bench_names_what_it_measures(penstock_command):
    args = ("bench", DEMO, "-p", 8, "-n", 4, "-b", "1,2", "--json")
    done = penstock_command(*args)
    assert done.stderr.splitlines() == ["measuring (3 figures)"]
    with Terminal(*args) as terminal:
        seen = terminal.rest(120)
    for part in ("prefill", "decode, batch 1", "decode, batch 2", "66% of 3 figures"):
        assert part in seen


def test_no_colour_leaves_a_plain_bar(tmp_path):
    with Terminal("bench", DEMO, "-p", 8, "-n", 4, "-b", "1", "--json", NO_COLOR="1") as terminal:
        seen = terminal.rest(120)
    assert "measuring" in seen
    assert "\x1b[3" not in seen
    with Terminal("bench", DEMO, "-p", 8, "-n", 4, "-b", "1", "--json", TERM="dumb") as terminal:
        assert "\x1b" not in terminal.rest(120)
