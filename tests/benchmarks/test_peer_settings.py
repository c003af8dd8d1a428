"""benchmarks/peers: no peer runs with worse settings than those that it was fastest with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
sys.path.append(str(PEERS))

import install  # noqa: E402
import run_llamacpp  # noqa: E402
from protocol import Launch  # noqa: E402


def launch(**options: str) -> Launch:
    return Launch(Path("model"), "mode", 2, ("decode:1",), options)


def test_llama_cpp_is_a_native_build_with_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DGGML_OPENMP=ON"} <= set(install.LLAMA_CPP_FLAGS)
    calls: list[tuple[str, ...]] = []

    def call(self: run_llamacpp.LlamaCpp, tool: str, *arguments: str) -> str:
        calls.append((tool, *arguments))
        return json.dumps([{"samples_ts": [1.0]}]) if tool == "llama-bench" else json.dumps({"speed_tg": 2.0})

    monkeypatch.setattr(run_llamacpp.LlamaCpp, "call", call)
    peer = run_llamacpp.LlamaCpp(launch(tools="tools"))
    for measure in ("prefill:512", "decode:1", "decode:8"):
        run_llamacpp.measure(peer, measure)
    prefill, single, batch = (" ".join(one) for one in calls)
    assert prefill.endswith("-p 512 -n 0 -r 3")
    assert single.endswith("-p 0 -n 64 -d 128 -r 5")
    assert "-b 2048 -ub 512 -tb 2 -npp 128 -ntg 24 -npl 8" in batch
    assert "-t 2" in " ".join(run_llamacpp.start_command(Path("tools"), Path("model"), 2))
