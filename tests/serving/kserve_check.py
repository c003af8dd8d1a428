"""KServe's own inference clients against a service: python tests/serving/kserve_check.py PYTHON (which has kserve).

``make check-kserve`` runs it. KServe brings 60 packages with it, too many for the tests' environment; what its clients
send is tested there as messages (test_kserve.py).
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

DEMO = Path(__file__).parents[2] / "demo" / "demo.psm"
PROMPT, NUM_NEW = "def add(a, b):", 8


async def ask(url: str, grpc_address: str, expected: str) -> None:
    """In an environment with kserve: every call that applies, JSON and bytes, both protocols."""
    import numpy as np
    from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
    from kserve.inference_client import RESTConfig

    def request(binary: bool) -> InferRequest:
        text = InferInput("text_input", [1], "BYTES")
        text.set_data_from_numpy(np.array([PROMPT.encode()], object), binary_data=binary)
        temperature = InferInput("temperature", [1], "FP32")
        temperature.set_data_from_numpy(np.zeros(1, np.float32), binary_data=binary)
        return InferRequest("demo", [text, temperature], parameters={"max_tokens": NUM_NEW})

    def text_of(response: object) -> str:
        (found,) = [one for one in response.outputs if one.name == "text_output"]
        (value,) = found.as_numpy().tolist()
        return value.decode() if isinstance(value, bytes) else value

    rest = InferenceRESTClient(RESTConfig(protocol="v2", retries=1, timeout=60))
    assert await rest.is_server_live(url)
    assert await rest.is_server_ready(url)
    assert await rest.is_model_ready(url, "demo")
    grpc = InferenceGRPCClient(grpc_address)
    assert await grpc.is_server_live()
    assert await grpc.is_server_ready()
    assert await grpc.is_model_ready("demo")
    for binary in (False, True):
        assert text_of(await rest.infer(url, request(binary), model_name="demo")) == expected
        assert text_of(await grpc.infer(request(binary))) == expected
    await grpc.close()
    await rest.close()
    print("KServe's clients get the answers of /v1/completions, over REST and gRPC, as JSON and as bytes")


def main(python: str) -> int:
    command = [sys.executable, "-m", "penstock", "serve", f"demo={DEMO}", "--port", "0", "--grpc-port", "0"]
    service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = re.search(r"http://\S+", service.stdout.readline())[0]
        lines = [service.stdout.readline() for _ in range(3)]
        address = re.search(r" at (\S+:\d+)", lines[-1])[1]
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": NUM_NEW, "temperature": 0.0}
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)  # noqa: S310
        with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310
            expected = json.load(answer)["choices"][0]["text"]
        return subprocess.run([python, __file__, url, address, expected], check=False).returncode
    finally:
        service.terminate()
        service.wait(60)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        sys.exit(main(sys.argv[1]))
    asyncio.run(ask(*sys.argv[1:]))
