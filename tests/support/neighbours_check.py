"""Run by the Python of another environment: the service starts there, and answers the clients that are installed.

``python neighbours_check.py DEMO NEIGHBOUR...``: the neighbours are imported beside the package's own messages.  The
last line of the output is JSON with the versions.
"""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

SHOWN = ("protobuf", "grpcio", "numpy", "msgspec", "httpx", "huggingface_hub")


def main() -> int:
    demo, *neighbours = sys.argv[1:]
    command = [str(Path(sysconfig.get_path("scripts")) / "penstock"), "serve", demo, "--port", "0", "--grpc-port", "0"]
    with tempfile.TemporaryFile("w+") as log:
        service = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            url, address = _addresses(service)
            _check_http(url)
            if "grpc_health" in neighbours:
                _check_health(address)
            if "tritonclient.grpc" in neighbours:
                _check_triton(address)
            service.send_signal(signal.SIGTERM)
            assert service.wait() == 0
        except BaseException:
            service.kill()
            service.wait()
            log.seek(0)
            print(log.read())
            raise
    _check_in_one_process(demo, neighbours)
    print(json.dumps({name: version(name) for name in SHOWN}))
    return 0


def _addresses(service: subprocess.Popen[str]) -> tuple[str, str]:
    """Return the URL and the gRPC address that the service prints when it is ready."""
    url = address = ""
    for line in service.stdout:
        url = url or next((word for word in line.split() if word.startswith("http://")), "")
        if "gRPC (" in line:
            address = line.split(" at ")[-1].split()[0]
        if "  try: " in line:
            return url, address
    raise AssertionError("the service did not start")


def _check_http(url: str) -> None:
    from penstock import Client

    with Client(url) as client:
        assert [model["id"] for model in client.models()] == ["demo"]
        assert client.complete("def", model="demo", max_tokens=4, temperature=0)["choices"][0]["text"]


def _check_health(address: str) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert response.status == health_pb2.HealthCheckResponse.SERVING


def _check_triton(address: str) -> None:
    import numpy as np
    import tritonclient.grpc as triton

    text = triton.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"def"], object))
    with triton.InferenceServerClient(address) as client:
        assert client.is_server_ready()
        result = client.infer("demo", [text], parameters={"max_tokens": 4, "temperature": 0})
        assert result.as_numpy("text_output").size == 1


def _check_in_one_process(demo: str, neighbours: list[str]) -> None:
    from penstock import LLM, SamplingParams
    from penstock.hub import downloaded, remote
    from penstock.serving.proto import health_pb2, oip_pb2, reflection_pb2, wire_pb2

    for name in neighbours:
        importlib.import_module(name)
    for own in (health_pb2, oip_pb2, reflection_pb2, wire_pb2):
        message = next(iter(own.DESCRIPTOR.message_types_by_name))
        assert getattr(own, message).FromString(getattr(own, message)().SerializeToString()) is not None
    assert downloaded.__all__
    assert remote.__all__
    with LLM(demo) as llm:
        assert llm.generate("def", SamplingParams(max_tokens=4, temperature=0)).text


if __name__ == "__main__":
    sys.exit(main())
