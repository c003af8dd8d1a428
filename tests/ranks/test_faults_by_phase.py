"""A rank fails before a batch, inside an exchange of a layer, or before its reply: its request ends at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock import env
from penstock.core.rank_layout import RankLayout
from penstock.engine.params import SamplingParams
from penstock.errors import UnavailableError
from penstock.llm.llm import LLM
from penstock.runtime.ranks import rank_group
from tests.support.errors import raises
from tests.support.faulty_rank import plant
from tests.support.rank_processes import DEMO, LIMITS, PROMPTS, SHARED_MEMORY, left_in_shared_memory, rank_pids

ENDS = {"SIGKILL": "was killed by SIGKILL", "SIGSTOP": "is stopped by a signal", "exception": "a planted fault"}
PHASES = {
    "before the batch": (RankLayout(2), 1, "broadcast", 1),
    "first gather of layer 0": (RankLayout(2), 1, "all_gather", 2),
    "gather inside a later layer": (RankLayout(2), 1, "all_gather", 11),
    "before the reply": (RankLayout(2), 1, "all_gather", 0),
    "gather of the third rank": (RankLayout(3), 2, "all_gather", 7),
    "partitions of a context": (RankLayout(cp=2), 1, "all_gather", 5),
    "stage before the batch": (RankLayout(pp=2), 1, "await", 1),
    "stage before its rows": (RankLayout(pp=2), 1, "send", 0),
    "last stage inside a step": (RankLayout(pp=2), 2, "recv", 1),
    "last stage before the reply": (RankLayout(pp=2), 2, "send", 0),
}
QUICK = ("gather inside a later layer", "SIGKILL")


@pytest.mark.parametrize(
    ("phase", "kind"),
    [
        pytest.param(phase, kind, marks=() if (phase, kind) == QUICK else pytest.mark.long)
        for phase in PHASES
        for kind in ENDS
    ],
)
def test_a_request_ends_when_a_rank_fails(
    phase: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, rank, function, number = PHASES[phase]
    variables = env.child_environment() | plant(tmp_path, rank=rank, function=function, number=number, kind=kind)
    monkeypatch.setattr(rank_group, "child_environment", lambda: variables)
    descriptors, shared = len(os.listdir("/proc/self/fd")), set(os.listdir(SHARED_MEMORY))
    sizes = {"tensor_parallel_size": layout.tp, "pipeline_parallel_size": layout.pp, "context_parallel_size": layout.cp}
    with LLM(DEMO, threads=1, limits=LIMITS, **sizes) as llm:
        stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
        for _ in range(3):
            next(stream)
        (tmp_path / "armed").touch()
        with raises(UnavailableError, match=f"rank {rank}.*{ENDS[kind]}") as caught:
            list(stream)
        assert caught.value.code == "unavailable"  # retry later
        assert (tmp_path / "done").exists()
    assert rank_pids() == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors  # fewer if garbage of an earlier test went
    assert not left_in_shared_memory(shared)
