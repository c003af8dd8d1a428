"""KServe's own inference clients against a service: python tests/serving/oip/kserve_check.py PYTHON (which has kserve).

``make check-kserve`` runs it. KServe brings 60 packages with it, too many for the tests' environment; what its clients
send is tested there as messages (test_kserve.py).
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

DEMO = Path(__file__).parents[3] / "demo" / "demo.psm"
PROMPT, NUM_NEW = "def add(a, b):", 8
SERVABLE = """from penstock import servable


@servable.stage(outputs={"y": "FP32[3]", "back": "BYTES[]"})
def mark(x, word):
    return 2 * x, b"<" + word + b">"


@servable.method(inputs={"x": "FP32[3]", "word": "BYTES[]"}, outputs={"y": "FP32[3]", "back": "BYTES[]"})
def both(x, word):
    return mark(x, word)
"""
NOT_THERE, NOT_FITTING = (404, "NOT_FOUND"), (400, "INVALID_ARGUMENT")


async def ask(url: str, grpc_address: str, expected: str) -> None:
    """In an environment with kserve: every call that applies, JSON and bytes, both protocols."""
    from kserve import InferenceGRPCClient, InferenceRESTClient
    from kserve.inference_client import RESTConfig
    from kserve.logging import trace_logger

    trace_logger.disabled = True  # which writes a trace of each refusal
    rest = InferenceRESTClient(RESTConfig(protocol="v2", retries=1, timeout=60))
    grpc = InferenceGRPCClient(grpc_address)
    try:
        assert await rest.is_server_live(url)
        assert await rest.is_server_ready(url)
        assert await grpc.is_server_live()
        assert await grpc.is_server_ready()
        for model in ("demo", "marked", "marked.both"):
            assert await rest.is_model_ready(url, model)
            assert await grpc.is_model_ready(model)
        assert not await rest.is_model_ready(url, "nobody")
        (error,) = await asyncio.gather(grpc.is_model_ready("nobody"), return_exceptions=True)
        assert error.code().name == "NOT_FOUND", error
        await ask_model(url, rest, grpc, expected)
        await ask_servable(url, rest, grpc)
    finally:
        await grpc.close()
        await rest.close()
    print("KServe's clients: a language model and a servable answer over REST and gRPC, as JSON and as bytes")


async def ask_model(url: str, rest: object, grpc: object, expected: str) -> None:
    """A language model: its answer is that of /v1/completions."""
    import numpy as np
    from kserve import InferInput, InferRequest

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

    for binary in (False, True):
        assert text_of(await rest.infer(url, request(binary), model_name="demo")) == expected
        assert text_of(await grpc.infer(request(binary))) == expected


async def ask_servable(url: str, rest: object, grpc: object) -> None:
    """A servable: FP32 and BYTES, all outputs and one, in either form; and what is refused."""
    import numpy as np
    from grpc.aio import AioRpcError
    from httpx import HTTPStatusError
    from kserve import InferInput, InferRequest
    from kserve.protocol.infer_type import RequestedOutput

    x, words = np.array([[1, 2, 3], [-0.5, 0, 1e9]], np.float32), ["ab", "über"]
    wanted = {"y": (2 * x).tolist(), "back": [f"<{one}>" for one in words]}

    def request(binary: bool, outputs: object = None, model: str = "marked", rows: int = 2) -> InferRequest:
        number = InferInput("x", [rows, 3], "FP32")
        number.set_data_from_numpy(x[:rows], binary_data=binary)
        word = InferInput("word", [2], "BYTES")
        word.set_data_from_numpy(np.array([one.encode() for one in words], object), binary_data=binary)
        return InferRequest(model, [number, word], request_id="mine", request_outputs=outputs)

    def arrays(response: object) -> dict[str, object]:
        """Texts whichever form they came in."""
        assert (response.model_name, response.id) == ("marked.both", "mine")
        found = {one.name: one.as_numpy().tolist() for one in response.outputs}
        if "back" in found:
            found["back"] = [one.decode() if isinstance(one, bytes) else one for one in found["back"]]
        return found

    for binary in (False, True):
        assert arrays(await rest.infer(url, request(binary), model_name="marked")) == wanted
        assert arrays(await grpc.infer(request(binary))) == wanted
        for name, array in wanted.items():
            for form in (None, {"binary_data": False}, {"binary_data": True}):
                asked, headers = request(binary, [RequestedOutput(name, form)]), {}
                found = await rest.infer(url, asked, model_name="marked", response_headers=headers)
                assert arrays(found) == {name: array}
                assert ("inference-header-content-length" in headers) == (form == {"binary_data": True})
            assert arrays(await grpc.infer(request(binary, [RequestedOutput(name)]))) == {name: array}
        for model, rows, (status, code) in (("nobody", 2, NOT_THERE), ("marked", 1, NOT_FITTING)):
            asked = request(binary, model=model, rows=rows)
            found = await asyncio.gather(
                rest.infer(url, asked, model_name=model), grpc.infer(asked), return_exceptions=True
            )
            assert [type(one) for one in found] == [HTTPStatusError, AioRpcError], found
            assert (found[0].response.status_code, found[1].code().name) == (status, code)
            assert found[0].response.json()["error"] == found[1].details()


def main(python: str) -> int:
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "marked"
        (folder / "1").mkdir(parents=True)
        (folder / "servable.py").write_text(SERVABLE)
        command = [sys.executable, "-m", "penstock", "serve", f"demo={DEMO}", root, "--port", "0", "--grpc-port", "0"]
        service = subprocess.Popen([*command, "--log", "warning"], stdout=subprocess.PIPE, text=True)
        try:
            return check(python, service)
        finally:
            service.terminate()
            service.wait(60)


def check(python: str, service: subprocess.Popen[str]) -> int:
    url = re.search(r"http://\S+", service.stdout.readline())[0]
    address = next(re.search(r" at (\S+:\d+)", line)[1] for line in service.stdout if "gRPC" in line)
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": NUM_NEW, "temperature": 0.0}
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)  # noqa: S310
    with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310
        expected = json.load(answer)["choices"][0]["text"]
    return subprocess.run([python, __file__, url, address, expected], check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) == 2:
        sys.exit(main(sys.argv[1]))
    asyncio.run(ask(*sys.argv[1:]))
