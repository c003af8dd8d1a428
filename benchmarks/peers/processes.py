"""One job: start a system's process, let it measure with the bandwidth probed around each figure, take its figures."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from convert import checkpoint_of, convert
from install import python_of
from jobs import Job
from run_llamacpp import start_command
from systems import PENSTOCK

HERE = Path(__file__).parent
SCRIPTS = {
    PENSTOCK: "run_penstock.py",
    "llama.cpp": "run_llamacpp.py",
    "openvino": "run_openvino.py",
    "onnxruntime": "run_onnxruntime.py",
    "vllm": "run_vllm.py",
    "ctranslate2": "run_ctranslate2.py",
    "transformers": "run_transformers.py",
}
LIMIT_S = 900
"""A process that takes longer is ended."""
STARTS = 3
"""Counted starts of a round, after one that is not."""
SETTLE_S = 0.3
"""Before a probe: threads that spin for more work have gone to sleep."""


@dataclass(frozen=True)
class Bench:
    """Where the peers are, and how they run.

    ``options`` are Penstock's, ``shared`` are options of every system; ``scripts``: what measures a peer.
    """

    folder: Path
    threads: int
    options: dict[str, str] = field(default_factory=dict)
    scripts: dict[str, str] = field(default_factory=lambda: SCRIPTS)
    shared: dict[str, str] = field(default_factory=dict)


def probe(bench: Bench, *options: str) -> dict[str, float]:
    """Measure the machine's limits in a separate process."""
    command = [sys.executable, str(HERE / "probe.py"), "--threads", str(bench.threads), *options]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def _bandwidth(bench: Bench) -> float:
    time.sleep(SETTLE_S)
    return probe(bench)["read"]


def _command(bench: Bench, job: Job, model: Path) -> list[str]:
    peer = job.system.peer
    own = peer in (PENSTOCK, "llama.cpp")
    python = sys.executable if own else str(python_of(bench.folder, peer))
    command = [python, str(HERE / bench.scripts[peer]), str(model), *job.measures]
    command += ["--mode", job.system.mode, "--threads", str(bench.threads)]
    options = bench.shared | (bench.options if peer == PENSTOCK else {})
    if peer == "llama.cpp":
        options["tools"] = str(_tools(bench))
    if peer == "ctranslate2":
        options["tokenizer"] = str(checkpoint_of(bench.folder, job.shape) / "tokenizer.json")
    return command + [f"--option={name}={value}" for name, value in options.items()]


def _tools(bench: Bench) -> Path:
    return bench.folder / "llama.cpp" / "build" / "bin"


def _environment(bench: Bench, peer: str) -> dict[str, str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(bench.folder / "vllm-cache")}
    environment.pop("PYTHONSAFEPATH", None)  # scripts import what lies beside them
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # every peer's installation has its bytecode compiled
    if peer != PENSTOCK:  # a path to our sources is not for others
        environment.pop("PYTHONPATH", None)
    return environment


def _end(child: subprocess.Popen[str]) -> None:
    """End a process that still runs, and what it started."""
    if child.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


@contextmanager
def _process(bench: Bench, command: list[str], peer: str, log: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """A child with text pipes, ended after LIMIT_S and in any case at the end; SystemExit when it fails."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
    with subprocess.Popen(command, **pipes, env=_environment(bench, peer), process_group=0) as child:
        timer = threading.Timer(LIMIT_S, _end, (child,))
        timer.start()
        try:
            yield child
            if child.stdin:
                child.stdin.close()
            if child.wait():
                raise SystemExit(f"ended with {child.returncode}; see {log.name}")
        finally:
            timer.cancel()
            _end(child)


def run_job(bench: Bench, job: Job, add: Callable[[dict[str, Any]], None]) -> None:
    """Take the job's figures and give each to ``add``; a failure is a figure's ``error``."""
    left = list(job.measures)

    def record(measure: str, figures: dict[str, Any]) -> None:
        left.remove(measure)
        key = {"shape": job.shape, "system": job.system.name, "measure": measure, "round": job.round}
        add({**key, "at": time.strftime("%Y-%m-%d %H:%M:%S"), **figures})

    log_path = bench.folder / "logs" / f"{job.system.peer}-{job.system.mode}-{job.shape}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    try:
        model = convert(bench.folder, job.shape, job.system)
        with log_path.open("w") as log:
            if job.measures == ("start",):
                record("start", _starts(bench, job, model, log))
            else:
                _figures(bench, job, model, log, record)
    except (SystemExit, OSError, ValueError) as error:
        for measure in list(left):
            record(measure, {"error": str(error)})


def _figures(bench: Bench, job: Job, model: Path, log: IO[str], record: Callable[[str, dict[str, Any]], None]) -> None:
    before = 0.0
    with _process(bench, _command(bench, job, model), job.system.peer, log) as child:
        if child.stdin is None or child.stdout is None:
            raise SystemExit("no pipes")
        for line in child.stdout:
            message = json.loads(line)
            if "ready" in message:
                before = _bandwidth(bench)
                child.stdin.write("\n")
                child.stdin.flush()
            else:
                after = _bandwidth(bench)
                record(message.pop("measure"), {**message, "probe_before": before, "probe_after": after})


def _starts(bench: Bench, job: Job, model: Path, log: IO[str]) -> dict[str, Any]:
    """Seconds from starting the process to its first token: the median, page cache warm."""
    if job.system.peer == "llama.cpp":
        command = start_command(_tools(bench), model, bench.threads)
    else:
        command = _command(bench, job, model)
    before = _bandwidth(bench)
    counted = 1 if job.system.together else STARTS
    warm = 0 if job.system.together else 1
    times = [_start_s(bench, command, job.system.peer, log) for _ in range(warm + counted)][warm:]
    return {
        "seconds": statistics.median(times),
        "runs": times,
        "probe_before": before,
        "probe_after": _bandwidth(bench),
    }


def _start_s(bench: Bench, command: list[str], peer: str, log: IO[str]) -> float:
    start = time.perf_counter()
    with _process(bench, command, peer, log) as child:
        if child.stdout is None:
            raise SystemExit("no pipes")
        child.stdout.read(1)
        elapsed = time.perf_counter() - start
        child.stdout.read()
    return elapsed
