"""gRPC clients of all kinds, for ``soak_serving.py``."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import grpc
from serving_grpc import FINAL, SERVICE, message

from penstock.serving.proto import oip_pb2 as pb

NUM_SHARED = 4
WRONG: tuple[dict[str, Any], ...] = ({"n": 0}, {"nonsense": 1}, {"temperature": -1.0}, {"timeout": 1})


class GrpcTraffic:
    """Runs calls and streams of one to three requests, of which one in twenty is invalid.

    One client in five disconnects at some moment, and one in ten has its own connection.  ``ends`` counts the outcomes.
    """

    def __init__(self, address: str, draw: random.Random, ends: Counter[str]) -> None:
        self.address, self.random, self.ends = address, draw, ends
        self._shared: list[grpc.aio.Channel] = []

    def _message(self) -> tuple[bytes, bool]:
        """Return a request, and True if it is valid."""
        draw = self.random
        prompt = [draw.randrange(300, 4000) for _ in range(draw.randrange(1, 60))]
        named: dict[str, Any] = draw.choice([{}, {"n": 2}, {"stop": "x"}, {"cache_salt": str(draw.random())}])
        if draw.random() < 0.05:
            return message(prompt, 4, **draw.choice(WRONG)), False
        return message(prompt, draw.randrange(1, 24), temperature=draw.random(), **named), True

    async def one(self) -> None:
        """Make one call, or a part of one."""
        draw = self.random
        is_own = draw.random() < 0.1
        if len(self._shared) < NUM_SHARED:
            self._shared.append(grpc.aio.insecure_channel(self.address))
        channel = grpc.aio.insecure_channel(self.address) if is_own else draw.choice(self._shared)
        num = draw.choice([0, 1, 2, 3])
        asked = [self._message() for _ in range(max(1, num))]
        work = self._stream(channel, asked) if num else self._whole(channel, *asked[0])
        leaves_s = draw.random() * 0.2 if draw.random() < 0.2 else 600.0
        try:
            async with asyncio.timeout(leaves_s):
                self.ends[await work] += 1
        except TimeoutError:
            self.ends["left over gRPC" if leaves_s < 1 else "status none over gRPC"] += 1
        finally:
            if is_own:
                await channel.close()

    async def _whole(self, channel: grpc.aio.Channel, data: bytes, is_right: bool) -> str:
        wanted, code = "OK" if is_right else "INVALID_ARGUMENT", "OK"
        try:
            await channel.unary_unary(SERVICE + "ModelInfer")(data)
        except grpc.aio.AioRpcError as error:
            code = error.code().name
        return "as expected over gRPC" if code == wanted else f"status {code} over gRPC"

    async def _stream(self, channel: grpc.aio.Channel, asked: list[tuple[bytes, bool]]) -> str:
        stream = channel.stream_stream(SERVICE + "ModelStreamInfer")()
        ends = errors = 0
        try:
            for data, _ in asked:
                await stream.write(data)
            await stream.done_writing()
            while (answer := await stream.read()) is not grpc.aio.EOF:
                found = pb.ModelStreamInferResponse.FromString(answer)
                parameters = found.infer_response.parameters
                ends += parameters[FINAL].bool_param
                errors += bool(found.error_message)
                if found.error_message and parameters["code"].string_param != "INVALID_ARGUMENT":
                    return f"status {parameters['code'].string_param} over gRPC"
        except grpc.aio.AioRpcError as error:
            return f"status {error.code().name} over gRPC"
        finally:
            stream.cancel()
        is_right = (ends, errors) == (len(asked), sum(not right for _, right in asked))
        return "as expected over gRPC" if is_right else f"status {ends} ends, {errors} errors over gRPC"

    async def close(self) -> None:
        """Close the channels."""
        with suppress(grpc.aio.AioRpcError):
            await asyncio.gather(*(one.close() for one in self._shared))
        self._shared.clear()
