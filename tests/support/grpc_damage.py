"""Requests of the Open Inference Protocol, good ones and such as were damaged: their tensors, or their bytes."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any, Final

from penstock.serving.proto import oip_pb2 as pb
from penstock.tensors import DTYPES

NAMES: Final = (
    "", "text_input", "input_ids", "max_tokens", "temperature", "top_k", "stop", "logit_bias",
    "stop_token_ids", "stream", "timeout", "priority", "cache_salt", "truncate_prompt_tokens",
    "echo", "sequence_id", "é\U0001f600", "x" * 300,
)  # fmt: skip
SHAPES: Final = ([], [0], [1], [2], [-1], [1, 1], [1, 1, 1], [3, 2], [1] * 17, [2**32, 2**32], [2**63 - 1] * 2)
TEXTS: Final = (
    "",
    "x",
    "{",
    "[1]",
    '{"5": 1e999}',
    '{"\\ud800": 1}',
    '{"\\udfff\\u0000": "\\ud800"}',
    "\0",
    "é" * 600,
    "\U0001f600" * 300,
)
NUMBERS: Final = (-(2**63), -1, 0, 1, 2, 3, 255, 2**31 - 1, 2**31, 2**63 - 1)
FLOATS: Final = (0.0, -0.0, 0.5, 1.0, -1.0, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"))
CONTENTS: Final = tuple(one.name for one in pb.InferTensorContents.DESCRIPTOR.fields)
SPLICES: Final = (
    b"", b"\x00", b"\xff", b"\x0a\x00", b"\x2a\x00", b"\x22\x00", b"\x3a\x00", b"\xff\xff\xff\xff\x0f", b"\x80" * 11,
    b"\x0b\x0c", b"\xed\xa0\x80", b"\x2a\x02\x2a\x00", b"\x2a\x7f",
)  # fmt: skip


def asked(number: int) -> pb.ModelInferRequest:
    """A good request of two tokens, whose answer depends on its number."""
    found = pb.ModelInferRequest(id=f"good {number}")
    one = found.inputs.add(name="input_ids", datatype="INT32", shape=[2])
    one.contents.int_contents.extend([5 + number % 40, 7])
    found.parameters["max_tokens"].int64_param = 2
    found.parameters["temperature"].double_param = 0
    return found


def _rich() -> pb.ModelInferRequest:
    """Raw contents of many datatypes."""
    found = pb.ModelInferRequest(model_name="fake", model_version="1", id="rich")
    texts = b"".join(struct.pack("<I", len(one)) + one for one in (b"the cat", "ü".encode()))
    for name, datatype, shape, raw in (
        ("text_input", "BYTES", [2], texts), ("temperature", "FP16", [1], b"\x00\x38"),
        ("seed", "UINT64", [1], b"\x07" + bytes(7)),
        ("max_tokens", "INT8", [1], b"\x03"), ("stop_token_ids", "INT64", [2], struct.pack("<2q", 9, 11)),
        ("ignore_eos", "BOOL", [1], b"\x01"), ("top_p", "BF16", [1], b"\x80\x3f"),
        ("logit_bias", "BYTES", [1], b'\x0b\0\0\0{"5": -1.5}'),
    ):  # fmt: skip
        found.inputs.add(name=name, datatype=datatype, shape=shape)
        found.raw_input_contents.append(raw)
    for name in ("text_output", "output_ids"):
        found.outputs.add(name=name)
    return found


def _plain() -> pb.ModelInferRequest:
    """Typed contents, and parameters of every kind."""
    found = pb.ModelInferRequest(id="plain")
    found.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(b"sat on")
    for name, kind, value in (
        ("max_tokens", "uint64_param", 3), ("temperature", "double_param", 0.7), ("seed", "int64_param", 3),
        ("n", "int64_param", 2),
        ("ignore_eos", "bool_param", True), ("stop", "string_param", "a"),
        ("logit_bias", "string_param", '{"5": -1.5}'),
        ("user", "string_param", "x"), ("priority", "int64_param", -3),
        ("triton_enable_empty_final_response", "bool_param", True),
    ):  # fmt: skip
        setattr(found.parameters[name], kind, value)
    return found


GOOD: Final = (_rich(), _plain(), asked(1000))


def _parameter(rng: random.Random, found: pb.ModelInferRequest) -> None:
    kind = rng.choice(("bool_param", "int64_param", "string_param", "double_param", "uint64_param", ""))
    one = found.parameters[rng.choice(NAMES)]
    values: dict[str, tuple[Any, ...]] = {
        "bool_param": (True, False), "int64_param": NUMBERS, "string_param": TEXTS, "double_param": FLOATS,
        "uint64_param": (0, 1, 2**63, 2**64 - 1),
    }  # fmt: skip
    if kind:
        setattr(one, kind, rng.choice(values[kind]))


def _contents(rng: random.Random, found: pb.ModelInferRequest) -> None:
    field = rng.choice(CONTENTS)
    texts = [one.encode() for one in TEXTS] + [b"\xff\xfe"]
    small = [number for number in NUMBERS if abs(number) < 2**31]
    choices: dict[str, Any] = {
        "bool_contents": [True, False], "bytes_contents": texts, "fp32_contents": FLOATS, "fp64_contents": FLOATS,
        "int_contents": small, "int64_contents": NUMBERS,
    }  # fmt: skip
    values = rng.choices(choices.get(field, [one for one in NUMBERS if 0 <= one < 2**32]), k=rng.randrange(4))
    getattr(_tensor(rng, found).contents, field).extend(values)


def _tensor(rng: random.Random, found: pb.ModelInferRequest) -> Any:
    return rng.choice(found.inputs) if found.inputs else found.inputs.add()


def _raw(rng: random.Random, found: pb.ModelInferRequest) -> None:
    if found.raw_input_contents and rng.random() < 0.7:
        at = rng.randrange(len(found.raw_input_contents))
        old = found.raw_input_contents[at]
        found.raw_input_contents[at] = rng.choice((b"", old[:-1], old + b"\0", rng.randbytes(len(old)), old * 3))
    else:
        found.raw_input_contents.append(rng.randbytes(rng.randrange(9)))


def _names(rng: random.Random, found: pb.ModelInferRequest) -> None:
    field = rng.choice(("model_name", "model_version", "id"))
    setattr(found, field, rng.choice((*NAMES, "fake", "../fake", "2", "x" * 2000)))


def _shape(rng: random.Random, found: pb.ModelInferRequest) -> None:
    _tensor(rng, found).shape[:] = rng.choice(SHAPES)


def _rename(rng: random.Random, found: pb.ModelInferRequest) -> None:
    _tensor(rng, found).name = rng.choice(NAMES)


def _datatype(rng: random.Random, found: pb.ModelInferRequest) -> None:
    _tensor(rng, found).datatype = rng.choice((*DTYPES, "", "FP8", "é"))


def _twice(rng: random.Random, found: pb.ModelInferRequest) -> None:
    found.inputs.append(_tensor(rng, found))


def _output(rng: random.Random, found: pb.ModelInferRequest) -> None:
    one = found.outputs.add(name=rng.choice((*NAMES, "text_output", "index")))
    if rng.random() < 0.3:
        one.parameters["x"].int64_param = 1


def _odd(rng: random.Random, found: pb.ModelInferRequest) -> None:
    _tensor(rng, found).parameters["binary_data_size"].int64_param = rng.choice(NUMBERS)


WAYS: Final[tuple[Callable[[random.Random, pb.ModelInferRequest], None], ...]] = (
    _parameter, _contents, _raw, _names, _shape, _rename, _datatype, _twice, _output, _odd,
)  # fmt: skip


def wrong_tensors(rng: random.Random) -> bytes:
    """A message whose tensors, names or parameters were changed in one to three ways."""
    found = pb.ModelInferRequest()
    found.CopyFrom(rng.choice(GOOD))
    for _ in range(rng.randrange(1, 4)):
        rng.choice(WAYS)(rng, found)
    return found.SerializeToString()


def cut_bytes(rng: random.Random, data: bytes) -> bytes:
    """One to four pieces of some bytes left out, doubled or put in others' place."""
    found = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(found) + 1)
        end = min(len(found), at + rng.randrange(1, 12))
        match rng.randrange(4):
            case 0:
                found[at:end] = b""
            case 1:
                found[at:at] = rng.choice(SPLICES)
            case 2:
                found[at : at + 1] = rng.randbytes(1)
            case _:
                found[at:at] = found[at:end] * rng.randrange(1, 4)
    return bytes(found)


def damaged(rng: random.Random) -> bytes:
    """A message that may be anything."""
    return wrong_tensors(rng) if rng.random() < 0.5 else cut_bytes(rng, rng.choice(GOOD).SerializeToString())
