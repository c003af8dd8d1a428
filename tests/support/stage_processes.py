"""Processes of ``penstock stage``, which are the stages of pipelines of the test."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.env import child_environment
from penstock.llm.llm import LLM
from penstock.runtime.program import ProgramLimits
from penstock.runtime.ranks.stage_server import StageServer
from tests.support.rank_processes import DEMO, LIMITS

TOKEN = "ab" * 32


class Stages:
    """Processes of ``penstock stage``, and the port that they join."""

    def __init__(self, folder: Path, certificate: tuple[Path, Path]) -> None:
        self.certificate, self.key = certificate
        self.folder = folder
        self.port = 0
        self.processes: list[subprocess.Popen[str]] = []

    def start(
        self,
        *more: object,
        model: Path = DEMO,
        token: str = TOKEN,
        port: int = 0,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a stage; ``port``: of a proxy before rank 0 (0: none); ``variables``: more of its environment."""
        path = self.folder / f"token-{len(self.processes)}"
        path.write_text(token + "\n")
        path.chmod(0o600)
        command = [sys.executable, "-m", "penstock", "stage", model, "--primary", f"localhost:{port or self.port}"]
        command += ["--token-file", path, "--ca-file", self.certificate, "--threads", "1", *more]
        process = subprocess.Popen(
            [str(word) for word in command],
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment() | dict(variables or {}),
        )
        self.processes.append(process)
        return process

    def server(self, on_listen: Callable[[], object] = lambda: None, join_s: float = 600.0) -> StageServer:
        def listen(port: int) -> None:
            self.port = port
            on_listen()

        return StageServer("localhost", self.port, self.certificate, self.key, TOKEN, join_s, listen)

    def open_llm(
        self,
        num_stages: int = 2,
        on_listen: Callable[[], object] | None = None,
        *,
        model: Path = DEMO,
        limits: ProgramLimits = LIMITS,
        **options: Any,
    ) -> LLM:
        """The demo over stages, of which those that do not run yet are started."""

        def start() -> None:
            for _ in range(num_stages - sum(process.poll() is None for process in self.processes)):
                self.start(model=model)

        server = self.server(on_listen or start)
        return LLM(model, threads=1, limits=limits, pipeline_parallel_size=num_stages, stage_server=server, **options)

    def close(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        while self.processes:
            self.processes.pop().communicate(timeout=300)


@pytest.fixture
def stages(tmp_path: Path, certificate: tuple[Path, Path]) -> Iterator[Stages]:
    """Stages of the test, which end with it."""
    found = Stages(tmp_path, certificate)
    yield found
    found.close()
