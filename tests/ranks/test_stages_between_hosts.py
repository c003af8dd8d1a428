"""Stages in two network namespaces, over TLS frames: what two hosts are to them, with a link that can be cut."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.llm.llm import LLM
from tests.support.command import environment
from tests.support.network_hosts import ADDRESSES, Hosts, hosts
from tests.support.network_pipeline import answers
from tests.support.rank_processes import DEMO, LIMITS, ROOT
from tests.support.services import make_certificate
from tests.support.stage_processes import TOKEN

__all__ = ["hosts"]

PORT = 9100
DELAY_S = 0.005

pytestmark = pytest.mark.long


class Pipeline:
    """Rank 0 and the first stage on the first host, and the second stage on the other one."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        certificate, key = make_certificate(folder, ADDRESSES[0])
        token = folder / "token"
        token.write_text(TOKEN + "\n")
        token.chmod(0o600)
        self._primary = self._start(0, "tests.support.network_pipeline", certificate, key, TOKEN, ADDRESSES[0], PORT)
        words = ["penstock", "stage", DEMO, "--primary", f"{ADDRESSES[0]}:{PORT}", "--token-file", token]
        words += ["--ca-file", certificate, "--threads", "1"]
        self.stages = [self._start(host, *words) for host in (0, 1)]

    def _start(self, host: int, module: str, *words: object) -> subprocess.Popen[str]:
        command = [*self.hosts.inside(host), sys.executable, "-m", module, *map(str, words)]
        pipe, env = subprocess.PIPE, environment()
        env["PYTHONPATH"] += f":{ROOT}"
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env)

    def begin(self, command: str, tp: int = 1) -> None:
        assert self._primary.stdin is not None
        self._primary.stdin.write(f"{command} {tp}\n")
        self._primary.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self._primary.stdout is not None
        line = self._primary.stdout.readline()
        assert line, self._primary.communicate(timeout=300)[1]
        return dict(json.loads(line))

    def ask(self, tp: int = 1) -> dict[str, Any]:
        """What the pipeline answers."""
        self.begin("answer", tp)
        return self.read()

    def close(self) -> None:
        for process in (self._primary, *self.stages):
            process.kill()
            process.communicate(timeout=300)


@pytest.fixture
def pipeline(hosts: Hosts, tmp_path: Path) -> Iterator[Pipeline]:
    found = Pipeline(hosts, tmp_path)
    yield found
    found.close()


@pytest.fixture(scope="module")
def expected() -> dict[str, object]:
    """What one process answers."""
    with LLM(DEMO, threads=1, limits=LIMITS) as llm:
        return answers(llm)


def test_answers_between_hosts_are_the_same(pipeline: Pipeline, expected: dict[str, object]) -> None:
    before = pipeline.hosts.sent_bytes()
    for tp in (1, 2):
        assert pipeline.ask(tp) == expected
    assert pipeline.hosts.sent_bytes() - before > 1 << 15  # it went over the link


@pytest.mark.parametrize("hosts", [(DELAY_S, 2_000_000)], indirect=True)
def test_answers_over_a_slow_network_are_the_same(pipeline: Pipeline, expected: dict[str, object]) -> None:
    before = pipeline.hosts.sent_bytes()
    assert pipeline.ask() == expected
    assert pipeline.hosts.sent_bytes() - before > 1 << 14  # it went over the link


def test_a_cut_link_ends_the_request(pipeline: Pipeline, expected: dict[str, object]) -> None:
    check_cut(pipeline, expected, pipeline.hosts.cut, pipeline.hosts.heal)


@pytest.mark.parametrize("hosts", [(0.001, 0)], indirect=True)
def test_a_link_that_stands_still_ends_the_request(pipeline: Pipeline, expected: dict[str, object]) -> None:
    """As with a pulled cable, but the interfaces of both hosts stay up."""
    check_cut(pipeline, expected, pipeline.hosts.stop_forwarding, pipeline.hosts.forward_again)


def check_cut(
    pipeline: Pipeline, expected: dict[str, object], cut: Callable[[], None], heal: Callable[[], None]
) -> None:
    pipeline.begin("stream")
    for _ in range(3):
        assert pipeline.read()["token_ids"]
    cut()
    while "error" not in (found := pipeline.read()):
        pass
    assert re.search(rf"rank [12] at {ADDRESSES[1]}:\d+ is lost: no message for 1\.7 s", found["error"])
    assert found["code"] == "unavailable"  # retry later
    lost = pipeline.stages[1].stderr
    assert lost is not None
    while "no message for 1.7 s" not in (line := lost.readline()):  # the other half ends too
        assert line, "the stage ended"
    heal()
    assert pipeline.ask() == expected  # both stages join the next group by themselves
