"""A client for the gRPC port of ``penstock serve``: sends requests when they are due and records how they end."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from serving_figures import Outcome

from penstock.serving.proto import oip_pb2 as pb

SERVICE = "/inference.GRPCInferenceService/"
FINAL = "triton_final_response"
STREAM_EVERY = 8
"""One request in so many is a stream: a piece takes the door, and this client, about as long as a whole answer."""
KINDS = {"OK": "done", "RESOURCE_EXHAUSTED": "429"}


def message(prompt: Sequence[int], num_new: int, **parameters: Any) -> bytes:
    """Return a ModelInferRequest; parameters are integers, strings, booleans or floats."""
    found = pb.ModelInferRequest()
    one = found.inputs.add(name="input_ids", datatype="INT32", shape=[len(prompt)])
    one.contents.int_contents.extend(prompt)
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in {"max_tokens": num_new, **parameters}.items():
        setattr(found.parameters[name], kinds[type(value)], value)
    return found.SerializeToString()


def num_tokens_of(response: pb.ModelInferResponse) -> int:
    """Return the number of tokens of an answer, or of a part of it."""
    names = [one.name for one in response.outputs]
    return int.from_bytes(response.raw_output_contents[names.index("num_output_tokens")], "little")


class Client:
    """A client with one channel.  ``without_hint`` counts refusals without retry-after."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])
        self._infer = self._channel.unary_unary(SERVICE + "ModelInfer")
        self._stream = self._channel.stream_stream(SERVICE + "ModelStreamInfer")
        self.without_hint = 0
        self._turns = itertools.count()

    async def whole(self, data: bytes, outcome: Outcome, now: Callable[[], float]) -> None:
        """Call ModelInfer."""
        try:
            response = pb.ModelInferResponse.FromString(await self._infer(data))
            outcome.num_tokens = num_tokens_of(response)
            outcome.kind = "done"
        except grpc.aio.AioRpcError as error:
            outcome.kind = KINDS.get(error.code().name, error.code().name)
            self._hint(outcome, [name for name, _ in error.trailing_metadata() or ()])

    async def streamed(self, data: bytes, outcome: Outcome, now: Callable[[], float]) -> None:
        """Call ModelStreamInfer with one request."""
        outcome.kind = "cut short"
        try:
            stream = self._stream()
            await stream.write(data)
            await stream.done_writing()
            while (answer := await stream.read()) is not grpc.aio.EOF:
                found = pb.ModelStreamInferResponse.FromString(answer)
                response = found.infer_response
                if found.error_message:
                    code = response.parameters["code"].string_param
                    outcome.kind = KINDS.get(code, code)
                    self._hint(outcome, [*response.parameters])
                    continue
                outcome.pieces_s.append(now())
                outcome.num_tokens += num_tokens_of(response)
                if response.parameters[FINAL].bool_param:
                    outcome.kind = "done"
        except grpc.aio.AioRpcError as error:
            outcome.kind = KINDS.get(error.code().name, error.code().name)

    def _hint(self, outcome: Outcome, names: Sequence[str]) -> None:
        self.without_hint += outcome.kind == "429" and "retry-after" not in names

    async def play(
        self, messages: Sequence[bytes], due: Sequence[float], stream_every: int = STREAM_EVERY
    ) -> list[Outcome]:
        """Send each request when it is due (seconds from now); return the outcomes."""
        start = time.perf_counter()

        def now() -> float:
            return time.perf_counter() - start

        async def one(index: int) -> Outcome:
            await asyncio.sleep(max(0.0, due[index] - now()))
            outcome = Outcome(due[index], now(), 0.0)
            is_stream = next(self._turns) % stream_every == 0
            await (self.streamed if is_stream else self.whole)(messages[index], outcome, now)
            outcome.ended_s = now()
            return outcome

        return list(await asyncio.gather(*(one(index) for index in range(len(messages)))))

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()
