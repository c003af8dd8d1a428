"""A rank that waits for others says so, and how ranks find each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core import comm
from penstock.core.comm import JoinedComm
from penstock.env import child_environment
from tests.support import awaited_rank

CORE = Path(__file__).parents[2] / "core"


@pytest.mark.parametrize(("rank", "awaited"), [(0, "rank 1"), (1, "rank 0")])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_rank_names_the_rank_that_it_awaits(rank: int, awaited: str, is_named: bool) -> None:
    """In a process of its own: without a name, the ranks that one process started meet each other."""
    environment = child_environment()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    if is_named:
        environment |= {"MASTER_ADDR": f"test-{os.getpid()}-{rank}", "MASTER_PORT": "29500"}
    command = [sys.executable, awaited_rank.__file__, str(rank)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    (facts,), error = json.loads(done.stdout)
    assert (facts["event"], facts["rank"], facts["world"]) == ("ranks_awaited", rank, 2)
    for text in (facts["message"], error):
        assert "MASTER_ADDR" in text
        assert "MASTER_PORT" in text
    assert f"waits for {awaited}, at most" in facts["message"]


def test_only_one_error_of_the_core_says_that_the_time_is_up() -> None:
    """comm.py knows it by its text."""
    lines = (CORE / "src" / "comm" / "rendezvous.cpp").read_text().splitlines()
    assert [line.split('"')[1][:17] for line in lines if "fail(" in line and comm._LATE in line] == [
        "ranks: %s within "
    ]


def test_a_rank_whose_group_is_there_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    JoinedComm(0, 1, 4096).close()
    assert caplog.records == []
