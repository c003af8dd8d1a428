"""A rank that waits for others says so, and how ranks find each other."""

from __future__ import annotations

import os

import pytest

from penstock.core.comm import JoinedComm
from penstock.errors import UnavailableError


@pytest.mark.parametrize(("rank", "awaited"), [(0, "rank 1"), (1, "rank 0")])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_rank_says_whom_it_waits_for(
    rank: int, awaited: str, is_named: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if is_named:
        monkeypatch.setenv("MASTER_ADDR", f"test-{os.getpid()}")
        monkeypatch.setenv("MASTER_PORT", "29500")
    else:
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(UnavailableError) as raised:
        JoinedComm(rank, 2, 4096, join_timeout_s=0.05, silent_s=0.0)
    (record,) = caplog.records
    facts = record.__dict__["facts"]
    assert (facts["event"], facts["rank"], facts["world"]) == ("ranks_awaited", rank, 2)
    for text in (facts["message"], str(raised.value)):
        assert "MASTER_ADDR" in text
        assert "MASTER_PORT" in text
    assert f"waits for {awaited}, at most" in facts["message"]


def test_a_rank_whose_group_is_there_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    JoinedComm(0, 1, 4096).close()
    assert caplog.records == []
