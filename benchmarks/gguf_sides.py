"""One side of gguf_pairs.py: a process that keeps a GGUF file open and measures on request.

    python benchmarks/gguf_sides.py penstock|llama.cpp|ik_llama.cpp FILE.gguf THREADS STAGES

With STAGES above 1 the layers are divided over as many processes of THREADS threads: stages of a pipeline here, and
servers of llama.cpp's RPC backend there.

Each line of standard input is a measure: ``decode N STEPS`` decodes N prompts of 128 tokens, ``prefill N`` computes one
prompt of N tokens up to its first token.  The answer is a line of JSON: ``wall_s`` and ``cpu_s``, the medians over the
steps.  ``memory`` asks for ``peak_rss_bytes``.  ``cpu_s`` is the time of all threads on their cores; it is fair with
one thread, as some threads wait actively.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

CONTEXT_LEN, MOST_STEPS, MOST_REQUESTS, STEP_TOKENS = 128, 100, 8, 512


class Side(Protocol):
    """A program with an open file."""

    def begin(self, prompts: list[list[int]]) -> None:
        """Compute prompts up to their first tokens."""

    def step(self) -> None:
        """Compute one more token of each."""

    def end(self) -> None:
        """Forget them."""


class Penstock:
    """The engine's loop, in process."""

    def __init__(self, file: str, threads: int, stages: int) -> None:
        from penstock.engine.engine import Engine
        from penstock.engine.options import EngineOptions
        from penstock.engine.params import ResolvedSampling
        from penstock.runtime.open import OpenOptions, open_program
        from penstock.runtime.program import ProgramLimits, pages_for

        length = STEP_TOKENS + MOST_STEPS
        limits = ProgramLimits(
            max_tokens=STEP_TOKENS,
            max_requests=MOST_REQUESTS,
            num_pages=MOST_REQUESTS * pages_for(length),
            context_len=length,
        )
        options = OpenOptions(pipeline_parallel_size=stages)
        program = open_program(file, threads=threads, limits=limits, options=options).program
        self.engine = Engine(program, EngineOptions(max_mixed_tokens=0))
        self.endless = ResolvedSampling(max_tokens=self.engine.max_len)
        self.requests: list[Any] = []

    def begin(self, prompts: list[list[int]]) -> None:
        self.requests = [self.engine.submit(ids, self.endless) for ids in prompts]
        while not all(request.output_ids for request in self.requests):
            self.step()

    def step(self) -> None:
        for _ in range(min(len(self.requests) or 1, self.engine.program.info.num_stages)):
            for request in self.engine.step():
                if request.error is not None:
                    raise request.error

    def end(self) -> None:
        for request in self.requests:
            self.engine.abort(request)


class LlamaCpp:
    """llama.cpp's functions, by llama-cpp-python.  The tokens are given, not sampled."""

    module = "llama_cpp"

    def __init__(self, file: str, threads: int, stages: int) -> None:
        import importlib

        self.lib: Any = importlib.import_module(self.module)
        self.lib.llama_backend_init()
        model_params = self.lib.llama_model_default_params()
        self.servers = RpcServers(threads, stages) if stages > 1 else None
        if self.servers is not None:
            model_params.n_gpu_layers = 999
            model_params.devices = ctypes.cast(self.servers.devices, ctypes.c_void_p)
        self.model = self.lib.llama_model_load_from_file(file.encode(), model_params)
        params = self.lib.llama_context_default_params()
        params.n_ctx = MOST_REQUESTS * (STEP_TOKENS + MOST_STEPS)
        params.n_batch = params.n_ubatch = STEP_TOKENS
        params.n_seq_max = MOST_REQUESTS
        params.n_threads = params.n_threads_batch = threads
        self.context = self.lib.llama_init_from_model(self.model, params)
        self.batch = self.lib.llama_batch_init(STEP_TOKENS, 0, 1)
        self.lengths: list[int] = []

    def decode(self, tokens: list[tuple[int, int, int]], outputs: int) -> None:
        """Compute (request, position, token id) rows, with logits of the last ``outputs``."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for row, (request, position, token) in enumerate(tokens):
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position, 1
            batch.seq_id[row][0], batch.logits[row] = request, row >= len(tokens) - outputs
        if self.lib.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        self.wait()

    def wait(self) -> None:
        self.lib.llama_synchronize(self.context)

    def begin(self, prompts: list[list[int]]) -> None:
        for request, ids in enumerate(prompts):
            self.decode([(request, position, token) for position, token in enumerate(ids)], 1)
        self.lengths = [len(ids) for ids in prompts]

    def step(self) -> None:
        rows = [(request, length, 300 + length % 1000) for request, length in enumerate(self.lengths)]
        self.decode(rows, len(rows))
        self.lengths = [length + 1 for length in self.lengths]

    def end(self) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)


class IkLlamaCpp(LlamaCpp):
    """ik_llama.cpp's functions of the same names, by ik-llama-cpp-python."""

    module = "ik_llama_cpp._ctypes_api"

    def wait(self) -> None:
        """Return at once: on a processor decoding is over when it returns."""

    def end(self) -> None:
        self.lib.llama_kv_cache_clear(self.context)


def ggml() -> tuple[Any, Any]:
    """Return llama.cpp's libraries ggml and ggml-rpc."""
    import importlib

    folder = Path(importlib.import_module("llama_cpp").__file__ or "").parent / "lib"
    library, rpc = (ctypes.CDLL(str(folder / f"lib{name}.so")) for name in ("ggml", "ggml-rpc"))
    for function in (
        library.ggml_backend_dev_by_type,
        library.ggml_backend_reg_dev_get,
        rpc.ggml_backend_rpc_add_server,
    ):
        function.restype = ctypes.c_void_p
    return library, rpc


class RpcServers:
    """Servers of llama.cpp's RPC backend on this host, each a process; they end with this one."""

    def __init__(self, threads: int, count: int) -> None:
        library, rpc = ggml()
        found = []
        for _ in range(count):
            with socket.create_server(("127.0.0.1", 0)) as free:
                endpoint = f"127.0.0.1:{free.getsockname()[1]}"
            command = [sys.executable, __file__, "rpc-server", endpoint, str(threads), "1"]
            subprocess.Popen(command, stdin=subprocess.PIPE)
            wait_for(endpoint)
            server = rpc.ggml_backend_rpc_add_server(endpoint.encode())
            found.append(library.ggml_backend_reg_dev_get(ctypes.c_void_p(server), ctypes.c_size_t(0)))
        self.devices = (ctypes.c_void_p * (count + 1))(*found, None)


def wait_for(endpoint: str) -> None:
    host, port = endpoint.split(":")
    for _ in range(100):
        try:
            socket.create_connection((host, int(port)), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"no RPC server at {endpoint}")


def serve_rpc(endpoint: str, threads: int) -> None:
    """Serve the processor to llama.cpp's RPC backend until standard input ends."""
    library, rpc = ggml()
    library.ggml_backend_load_all()
    devices = (ctypes.c_void_p * 1)(library.ggml_backend_dev_by_type(0))  # the processor
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    count = ctypes.c_size_t(1)
    rpc.ggml_backend_rpc_start_server(endpoint.encode(), None, ctypes.c_size_t(threads), count, devices)


SIDES: dict[str, Callable[[str, int, int], Side]] = {
    "penstock": Penstock,
    "llama.cpp": LlamaCpp,
    "ik_llama.cpp": IkLlamaCpp,
}


def clocked(work: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of the clock and of the process's cores."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(side: Side, kind: str, size: int, steps: int) -> dict[str, float]:
    stream = random.Random()
    length, requests = (size, 1) if kind == "prefill" else (CONTEXT_LEN, size)
    prompts = [[stream.randrange(300, 4000) for _ in range(length)] for _ in range(requests)]
    if kind == "prefill":
        times = [clocked(lambda: side.begin(prompts))]
    else:
        side.begin(prompts)
        times = [clocked(side.step) for _ in range(steps)]
    side.end()
    wall, cpu = (statistics.median(figures) for figures in zip(*times, strict=True))
    return {"wall_s": wall, "cpu_s": cpu}


def peak_rss_bytes() -> int:
    # not ru_maxrss, which a process inherits from the one that started it
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def main() -> None:
    name, file, threads, stages = sys.argv[1:]
    if name == "rpc-server":
        serve_rpc(file, int(threads))
        return
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # what libraries print goes to standard error
    os.dup2(2, 1)
    side = SIDES[name](file, int(threads), int(stages))
    measure(side, "decode", 1, 2)
    print(json.dumps({"ready": name}), file=answers)
    for line in sys.stdin:
        if line.strip() == "memory":
            print(json.dumps({"peak_rss_bytes": peak_rss_bytes()}), file=answers)
            continue
        kind, size, *steps = line.split()
        print(json.dumps(measure(side, kind, int(size), int(steps[0]) if steps else 1)), file=answers)


if __name__ == "__main__":
    main()
