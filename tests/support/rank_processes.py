"""Ranks as processes of this machine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from penstock import env
from penstock.engine.params import SamplingParams
from penstock.llm.llm import LLM
from penstock.runtime.program import ProgramLimits
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "demo.psm"
SHARED_MEMORY = "/dev/shm"  # noqa: S108
LIMITS = ProgramLimits(max_tokens=64, max_requests=4, context_len=256)
PROMPTS = ["def add(a, b):", "class Stack:\n    def __init__(self", "import os"]


def rank_pids(owner: int = 0) -> list[int]:
    """The processes of ranks that this process, or ``owner``, has started, in the order of their ranks."""
    found: list[tuple[int, int]] = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            command = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if parent == (owner or os.getpid()) and b"penstock.runtime.ranks.rank_process" in command:
            found.append((int(command.split(b"\0")[-2]), int(name)))
    return [pid for _, pid in sorted(found)]


def change_rank(folder: Path, rank: int, opening: str) -> str:
    """PYTHONPATH with which the process of a rank calls ``opening``, the body of a function, to open its program.

    ``on_opened`` and ``open_rank`` are those of ``penstock.runtime.ranks.open_ranks``, ``arguments`` those of
    ``open_rank``.
    """
    lines = "\n".join(f"        {line}" for line in opening.splitlines())
    text = f"""import sys, time
if "penstock.runtime.ranks.rank_process" in sys.orig_argv and sys.orig_argv[-1] == "{rank}":
    from penstock import errors
    from penstock.runtime.ranks import open_ranks
    open_rank = open_ranks.open_rank
    def changed(*arguments):
        on_opened = arguments[-1]
{lines}
    open_ranks.open_rank = changed
"""
    (folder / "sitecustomize.py").write_text(text)
    return os.pathsep.join([str(folder), env.child_environment()["PYTHONPATH"]])


def tokens_of(llm: LLM, prompts: list, params: SamplingParams) -> list:
    return [
        (answer.token_ids, answer.logprobs) for result in llm.generate(prompts, params) for answer in result.choices
    ]


def left_in_shared_memory(before: set[str]) -> set[str]:
    """The files that were not there before and stay: those of tests that run beside this one go with their ranks."""
    left = set(os.listdir(SHARED_MEMORY)) - before

    def are_gone() -> bool:
        left.intersection_update(os.listdir(SHARED_MEMORY))
        return not left

    with suppress(AssertionError):
        until(are_gone, pause_s=0.05, num_looks=2_400)
    return left
