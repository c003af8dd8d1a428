"""The systems that benchmarks/servables.py compares: an empty model as each system defines it, and how to start it.

Penstock and LitServe (by default; its ZeroMQ queue was no faster) run the model in its own process.  MLServer runs it
in the process that takes requests or, by default, in its own.  Ray Serve runs it in an actor without a limit on
requests in flight.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

PACKAGES = {
    "litserve": ("litserve==0.2.19",),
    "mlserver": ("mlserver==1.7.1", "uvloop==0.21.0"),  # its own processes do not start with a newer one
    "ray": ("ray[serve]==2.60.0", "tritonclient==2.73.0"),
}
OIP_METHOD = "/inference.GRPCInferenceService/ModelInfer"

LITSERVE = """
import sys
import litserve as ls

class Noop(ls.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request["inputs"][0]["data"]

    def predict(self, x):
        return x

    def encode_response(self, y):
        return {"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 4], "data": y}]}

if __name__ == "__main__":
    server = ls.LitServer(Noop(), accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="error")
"""
MLSERVER = """
from mlserver import MLModel
from mlserver.types import InferenceResponse, ResponseOutput

class Noop(MLModel):
    async def load(self):
        return True

    async def predict(self, payload):
        x = payload.inputs[0]
        y = ResponseOutput(name="y", shape=x.shape, datatype=x.datatype, data=x.data)
        return InferenceResponse(model_name=self.name, outputs=[y])
"""
RAY = """
import sys
import time
import ray
from ray import serve
from tritonclient.grpc import service_pb2 as pb

@serve.deployment(max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0})
class Noop:
    async def __call__(self, request):
        x = (await request.json())["inputs"][0]
        return {"outputs": [{"name": "y", "datatype": "FP32", "shape": x["shape"], "data": x["data"]}]}

    async def ModelInfer(self, request):
        found = pb.ModelInferResponse(model_name="noop", raw_output_contents=request.raw_input_contents)
        found.outputs.add(name="y", datatype="FP32", shape=request.inputs[0].shape)
        return found

if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=2, object_store_memory=100_000_000)
    servicer = "tritonclient.grpc.service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server"
    http = {"host": "127.0.0.1", "port": int(sys.argv[1])}
    serve.start(http_options=http, grpc_options={"port": int(sys.argv[2]), "grpc_servicer_functions": [servicer]})
    serve.run(Noop.bind(), name="noop")
    while True:
        time.sleep(60)
"""
PENSTOCK = """
from penstock import servable


@servable.stage(outputs={"y": "FP32[4]"}, batch_size=64)
def same(x):
    return x


@servable.method(inputs={"x": "FP32[4]"}, outputs={"y": "FP32[4]"})
def noop(x):
    return same(x)
"""


@dataclass(frozen=True)
class System:
    """A system.  ``write`` makes its files and returns the command for two ports; ``path`` is the HTTP route."""

    name: str
    path: str
    write: Callable[[Path, Path, int, int], tuple[list[str], dict[str, str]]]
    has_grpc: bool = True


def _penstock(folder: Path, peers: Path, port: int, grpc_port: int) -> tuple[list[str], dict[str, str]]:
    place = folder / "servables" / "noop"
    (place / "1").mkdir(parents=True)
    (place / "servable.py").write_text(PENSTOCK)
    command = [sys.executable, "-m", "penstock", "serve", str(folder / "servables"), "--log", "warning"]
    return [*command, "--port", str(port), "--grpc-port", str(grpc_port)], {}


def _litserve(folder: Path, peers: Path, port: int, grpc_port: int) -> tuple[list[str], dict[str, str]]:
    (folder / "noop.py").write_text(LITSERVE)
    return [str(peers / "litserve" / "bin" / "python"), "noop.py", str(port)], {}


def _mlserver(
    folder: Path, peers: Path, port: int, grpc_port: int, num_processes: int = 0
) -> tuple[list[str], dict[str, str]]:
    (folder / "noop.py").write_text(MLSERVER)
    (folder / "model-settings.json").write_text(json.dumps({"name": "noop", "implementation": "noop.Noop"}))
    settings = {
        "host": "127.0.0.1", "http_port": port, "grpc_port": grpc_port, "metrics_endpoint": None, "debug": False,
        "parallel_workers": num_processes,
    }  # fmt: skip
    (folder / "settings.json").write_text(json.dumps(settings))
    return [str(peers / "mlserver" / "bin" / "mlserver"), "start", "."], {"PYTHONPATH": str(folder)}


def _ray(folder: Path, peers: Path, port: int, grpc_port: int) -> tuple[list[str], dict[str, str]]:
    (folder / "noop.py").write_text(RAY)
    # Messages go pickled from its door to the model, and those of tritonclient say that they are of this module.
    (folder / "grpc_service_pb2.py").write_text("from tritonclient.grpc.service_pb2 import *\n")
    more = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(folder)}
    return [str(peers / "ray" / "bin" / "python"), "noop.py", str(port), str(grpc_port)], more


SYSTEMS = (
    System("Penstock", "/v2/models/noop/infer", _penstock),
    System("LitServe", "/predict", _litserve, has_grpc=False),
    System("MLServer", "/v2/models/noop/infer", _mlserver),
    System("MLServer, own process", "/v2/models/noop/infer", partial(_mlserver, num_processes=1)),
    System("Ray Serve", "/", _ray),
)


def body() -> bytes:
    """Return the HTTP request, which is the same for all systems: one instance of four numbers."""
    x = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}
    return json.dumps({"inputs": [x]}).encode()


def message() -> bytes:
    """Return the gRPC request, which is the same for all systems."""
    import numpy as np

    from penstock.serving.proto import oip_pb2 as pb

    found = pb.ModelInferRequest(model_name="noop")
    found.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    found.raw_input_contents.append(np.array([[1, 2, 3, 4]], "<f4").tobytes())
    data: bytes = found.SerializeToString()
    return data


def install(peers: Path) -> None:
    """Install each system with pip into a separate environment."""
    for name, packages in PACKAGES.items():
        python = peers / name / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", peers / name], check=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", "numpy", *packages], check=True)


@contextmanager
def running(system: System, folder: Path, peers: Path, ports: tuple[int, int]) -> Iterator[None]:
    """Yield the running system; SystemExit with its output if it does not answer."""
    folder.mkdir(parents=True)
    command, more = system.write(folder, peers, *ports)
    log = folder / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | more, stdout=stream, stderr=stream, start_new_session=True
        )  # fmt: skip
    try:
        _await(system, process, ports[0], log)
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):  # LitServe leaves its own behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if system.name == "Ray Serve":
            subprocess.run([peers / "ray" / "bin" / "ray", "stop", "--force"], capture_output=True, check=False)


def _await(system: System, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + 120
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{system.path}", body(), {"Content-Type": "application/json"}
    )
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=5):  # noqa: S310 - it is http
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
    raise SystemExit(f"{system.name} does not answer:\n{log.read_text()[-3000:]}")
