"""Commands that tests fork from a process with the imports behave as new interpreters do."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from tests.support import zygote
from tests.support.command import DEMO, ROOT, Run, environment
from tests.support.waiting import until


def test_a_forked_command_is_as_a_new_one(penstock_command: Run) -> None:
    for words in (("run", DEMO, "--max-tokens", "none"), ("run", DEMO, "x", "--temperature", 0, "--max-tokens", 2)):
        new, forked = (penstock_command(*words, stdin="a\r\n", cold=cold) for cold in (True, False))
        assert (forked.returncode, forked.stdout) == (new.returncode, new.stdout)
        assert forked.stderr == new.stderr or "tokens/s" in forked.stderr  # times


def test_an_interrupted_command_is_killed(tmp_path: Path) -> None:
    """It would wait for a writer to its input; what interrupts is a text that is no UTF-8."""
    os.mkfifo(tmp_path / "in.jsonl")
    words = ["batch", str(DEMO), str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
    command = zygote._start("command", words, environment(), ROOT)
    with pytest.raises(UnicodeEncodeError):
        command.communicate("\ud800")
    until(lambda: not psutil.pid_exists(command.pid))


@pytest.mark.parametrize(("name", "is_first"), [("PENSTOCK_CPU", False), ("PENSTOCK_MODELS", True)])
def test_what_imports_read_is_as_at_the_start(name: str, is_first: bool) -> None:
    assert zygote.has_first_imports(environment(**{name: "x"})) == is_first
