"""What the Open Inference Protocol's REST routes refuse: by name, without a bug of ours, and without memory for it."""

from __future__ import annotations

import gzip
import json
import os
import random
import zlib
from typing import Any

import pytest

from penstock.api_errors import CODES
from penstock.serving.settings import GatewayLimits, GatewaySettings
from tests.support.http_service import Service, raw
from tests.support.memory_use import check_flat
from tests.support.stub_methods import StubMethods

NUM = 800 * int(os.environ.get("PENSTOCK_CHAOS", "1"))
LIMIT = 1 << 20


@pytest.fixture(scope="module")
def service():
    found = Service({}, GatewaySettings(limits=GatewayLimits(body_bytes=LIMIT)), methods=StubMethods())
    yield found
    found.close()


def one(**fields: Any) -> dict[str, Any]:
    """An input that is in order but for what is given."""
    found = {"name": "x", "datatype": "INT32", "shape": [2], "data": [1, 2]} | fields
    return {name: value for name, value in found.items() if value is not ...}


def asked(service: Service, body: Any, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """Status, and what was told."""
    status, found, data = service.ask("POST", "/v2/models/echo/infer", body, headers)
    length = int(found.get("inference-header-content-length", len(data)))
    return status, json.loads(data[:length])


def behind(body: Any, data: bytes, length: Any = None) -> tuple[bytes, dict[str, str]]:
    """A body with bytes behind its JSON, and its header."""
    head = json.dumps(body).encode()
    return head + data, {"Inference-Header-Content-Length": str(len(head) if length is None else length)}


def sized(num_bytes: Any, **fields: Any) -> dict[str, Any]:
    return {"inputs": [one(data=..., parameters={"binary_data_size": num_bytes}, **fields)]}


def test_good_requests_pass(service):
    assert asked(service, {"inputs": [one()]})[0] == 200
    assert asked(service, *behind(sized(8), b"\0" * 8))[0] == 200


@pytest.mark.parametrize(
    ("tensor", "param"),
    [
        (one(shape=[-1]), "inputs[0].shape[0]"),
        (one(shape=[2**62, 2**62]), "x"),
        (one(shape=[2**32, 2**32, 0]), "x"),
        (one(shape=[1] * 17), "inputs[0].shape"),
        (one(shape=[2**64]), "inputs[0].shape[0]"),
        (one(shape=[1.5]), "inputs[0].shape[0]"),
        (one(shape=[3]), "x"),
        (one(shape=[]), "x"),
        (one(shape="2"), "inputs[0].shape"),
        (one(datatype="FP8"), "inputs[0].datatype"),
        (one(name=""), "inputs[0].name"),
        (one(name="n" * 300), "inputs[0].name"),
        (one(data=...), "x"),
        (one(data="12"), "x"),
        (one(data={"0": 1}), "x"),
        (one(data=[1, True]), "x"),
        (one(data=[1, 2.0]), "x"),
        (one(data=[1, None]), "x"),
        (one(data=[1, "2"]), "x"),
        (one(data=[1, 2**31]), "x"),
        (one(data=[1, -(10**300)]), "x"),
        (one(data=[[1], [2]]), "x"),
        (one(data=[[1, 2], [3]], shape=[2, 2]), "x"),
        (one(data=[[1, 2], 3], shape=[2, 2]), "x"),
        (one(data=[1, [2, 3]], shape=[2]), "x"),
        (one(data=[[1, 2]], shape=[2, 2]), "x"),
        (one(data=[[[1, 2]]], shape=[1, 2]), "x"),
        (one(datatype="UINT8", data=[1, -1]), "x"),
        (one(datatype="INT8", data=[1, 128]), "x"),
        (one(datatype="UINT64", data=[1, 2**64]), "x"),
        (one(datatype="FP32", data=[1, 1e39]), "x"),
        (one(datatype="FP16", data=[1, 65520]), "x"),
        (one(datatype="FP32", data=[1, 3.4028235677973366e38]), "x"),
        (one(datatype="FP32", data=[1, -(10**39)]), "x"),
        (one(datatype="BF16", data=[1, 3.4e38]), "x"),
        (one(datatype="FP64", data=[1, 10**400]), "x"),
        (one(datatype="FP32", data=[1, False]), "x"),
        (one(datatype="BOOL", data=[0, 1]), "x"),
        (one(datatype="BYTES", data=["a", 1]), "x"),
        (one(datatype="BYTES", data=[], shape=[0, 2**40]), "x"),
        (one(parameters={"shared_memory_region": "r"}), "inputs[0].parameters.shared_memory_region"),
        (one(parameters={"binary_data_size": 8}), "x"),
        (one(datatype="BYTES", shape=[2**21], data=["a"]), "x"),
    ],
)
def test_tensors_of_json_that_are_refused(service, tensor, param):
    status, told = asked(service, {"inputs": [tensor]})
    assert (status, told["param"]) == (400, param), told


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": [one()] * 2}, "x"),
        ({"inputs": [one(name=str(i)) for i in range(65)]}, "inputs"),
        ({"inputs": [one()], "outputs": [{"name": "x"}, {"name": "x"}]}, "x"),
        ({"inputs": [one()], "outputs": [{"name": "y"}]}, "y"),
        ({"inputs": [one()], "outputs": [{"name": "x", "parameters": {"classification": 3}}]},
         "outputs[0].parameters.classification"),
        ({"inputs": [one()], "id": 5}, "id"),
        ({"inputs": [one()], "id": "x" * 2000}, "id"),
        ({"inputs": [one()], "parameters": {"sequence_id": 1}}, "sequence_id"),
        ({"inputs": [one()], "parameters": {"timeout": 1}}, "timeout"),
        ({"inputs": [one()], "parameters": {"priority": "high"}}, "priority"),
        ({"inputs": [one()], "parameters": {"binary_data_output": 1}}, "binary_data_output"),
        ({"inputs": [one()], "nonsense": 1}, "nonsense"),
        ({"inputs": {"x": [1]}}, "inputs"),
        ([], None),
    ],
)  # fmt: skip
def test_bodies_of_infer_that_are_refused(service, body, param):
    status, told = asked(service, body)
    assert (status, told["param"]) == (400, param), told


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        behind(sized(9), b"\0" * 8),
        behind(sized(2**62), b"\0" * 8),
        behind(sized(-8), b"\0" * 8),
        behind(sized(7), b"\0" * 7),
        behind(sized(8), b"\0" * 9),
        behind(sized(8), b""),
        behind(sized(8), b"\0" * 8, length=10**6),
        behind(sized(8), b"\0" * 8, length="9" * 30),
        behind(sized(8), b"\0" * 8, length=-1),
        behind(sized(8), b"\0" * 8, length=0),
        behind(sized(8), b"\0" * 8, length=5),
        behind(sized(8), b"\0" * 8, length="0x20"),
        behind({"inputs": [one()]}, b"\0"),
        behind({"inputs": [one(parameters={"binary_data_size": 8})]}, b"\0" * 8),
        behind(sized(5, datatype="BYTES", shape=[1]), b"\xff\xff\xff\xffx"),
        behind(sized(3, datatype="BYTES", shape=[1]), b"\1\0\0"),
        behind(sized(6, datatype="BYTES", shape=[1]), b"\1\0\0\0xy"),
        behind(sized(4, datatype="BYTES", shape=[2**20]), b"\0" * 4),
        behind(sized(2, datatype="BOOL"), b"\0\2"),
        behind({"inputs": [one(name=name, data=..., parameters={"binary_data_size": 8}) for name in "xy"]}, b"\0" * 8),
    ],
)
def test_bytes_behind_json_that_are_refused(service, body, headers):
    status, told = asked(service, body, headers)
    assert (status, isinstance(told["error"], str)) == (400, True), told


def test_headers_that_are_there_twice_are_refused(service):
    body = json.dumps({"inputs": [one()]}).encode()
    for twice in (b"Inference-Header-Content-Length: %d" % len(body), b"Content-Encoding: gzip"):
        head = (
            b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + (twice + b"\r\n") * 2
        )
        answer = raw(service, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"invalid_header"' in answer


def test_outputs_beyond_json_need_binary_data(service):
    for name in ("infinite", "bytes"):
        body = {"inputs": [one()], "outputs": [{"name": name}]}
        status, _, data = service.ask("POST", "/v2/models/odd/infer", body)
        assert (status, json.loads(data)["code"], json.loads(data)["param"]) == (400, "not_json", name)
        body["outputs"][0]["parameters"] = {"binary_data": True}
        assert service.ask("POST", "/v2/models/odd/infer", body)[0] == 200


def test_errors_of_a_servable_are_only_in_the_log(service, caplog):
    status, _, data = service.ask("POST", "/v2/models/broken/infer", {"inputs": [one()]})
    assert (status, json.loads(data)["code"], b"secret" in data) == (500, "internal", False)


def test_nesting_and_counts(service):
    for body in (
        b'{"inputs": ' + b"[" * 100_000,
        b'{"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": ' + b"[" * 70 + b"]" * 70 + b"}]}",
        b'{"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [' + b"[]," * 70_000 + b"1]}]}",
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [NaN]}]}',
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [Infinity]}]}',
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1e999]}]}',
        b'{"inputs": [{"name": "x", "name": "y", "datatype": "INT32", "shape": [1], "data": [1]}]}',
        b'{"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["\\ud800"]}]}',
    ):
        status, told = asked(service, body)
        assert (status, told["code"]) == (400, "invalid_json"), body[:100]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_decompressed_bodies_are_limited(service, encoding):
    """Whatever it grows to; and what is no whole stream is refused."""
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    header = {"Content-Encoding": encoding}
    good = json.dumps({"inputs": [one()]}).encode()
    assert asked(service, pack(good + b" " * (LIMIT - len(good))), header)[0] == 200
    assert asked(service, pack(good + b" " * (LIMIT + 1 - len(good))), header)[0] == 413
    assert asked(service, pack(b" " * (64 * LIMIT)), header)[0] == 413
    for broken in (pack(good)[:-3], pack(good) + b"x", pack(good) * 2, b"nonsense", b""):
        status, told = asked(service, broken, header)
        assert (status, told["code"]) == (400, "invalid_compression")
    for other in ("br", "gzip, gzip", "zstd", "x-gzip"):
        assert asked(service, pack(good), {"Content-Encoding": other})[0] == 415
    assert service.ask("POST", "/v2/repository/index", pack(b"{}"), header)[0] == 415


def test_other_types_of_bodies(service):
    body = json.dumps({"inputs": [one()]}).encode()
    for kind in ("application/json", "application/json; charset=utf-8", "application/octet-stream"):
        assert asked(service, body, {"Content-Type": kind})[0] == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "x"):
        assert asked(service, body, {"Content-Type": kind})[0] == 415
    head = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    assert raw(service, head + b"Content-Length: %d\r\n\r\n" % len(body) + body).startswith(b"HTTP/1.1 200 ")


@pytest.mark.long
def test_memory_is_flat_under_what_is_refused(service):
    """65,537 chunks of a byte, sizes of all there is, bombs, depth: what was taken before is enough for all of it."""
    head = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    chunks = head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 65_537 + b"0\r\n\r\n"
    bomb = gzip.compress(b" " * (64 * LIMIT))

    def storm() -> None:
        assert raw(service, chunks).startswith(b"HTTP/1.1 400 ")
        assert asked(service, bomb, {"Content-Encoding": "gzip"})[0] == 413
        for body, headers in (
            behind(sized(2**40, shape=[2**38]), b"\0" * 8),
            behind(sized(2**20, datatype="BYTES", shape=[2**20]), b"\xff" * (LIMIT - 200)),
            (b"[" * LIMIT, {}),
            ({"inputs": [one(shape=[2**31, 2**31])]}, {}),
            ({"inputs": [one(datatype="BYTES", shape=[2**20])]}, {}),
        ):
            assert asked(service, body, headers)[0] in (400, 413)

    check_flat(storm, warm_up=5, rounds=12, largest=LIMIT, grown=2 * LIMIT)  # a round sends four


SEEDS = [
    behind({"id": "a", **sized(8), "outputs": [{"name": "x", "parameters": {"binary_data": True}}]}, b"\1\0\0\0" * 2),
    behind(sized(12, datatype="BYTES", shape=[2, 1]), b"\2\0\0\0ab\2\0\0\0cd"),
    (json.dumps({"inputs": [one(data=[[1], [2]], shape=[2, 1])], "parameters": {"timeout": 5000}}).encode(), {}),
    (json.dumps({"inputs": [one(datatype="FP16", data=[1.5, 2])], "outputs": [{"name": "x"}]}).encode(), {}),
]
SPLICES = [
    b"-1", b"0", b"9" * 19, b"9" * 400, b"[", b"]", b"[]", b"{", b'"', b"null", b"true", b"1e5", b"1e999", b"NaN",
    b"\xff\xff\xff\xff", b"\\ud800", b",", b'"BYTES"', b'"BF16"', b"binary_data_size",
]  # fmt: skip


def test_damaged_requests_are_answered_or_refused(service, caplog):
    """``PENSTOCK_CHAOS=n`` sends n times as many."""
    rng, statuses = random.Random(7), set()
    for _ in range(NUM):
        body, headers = rng.choice(SEEDS)
        data = bytearray(body)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data) + 1)
            data[at : at + rng.randrange(4)] = rng.choice((*SPLICES, rng.randbytes(rng.randrange(3))))
        if headers and rng.random() < 0.7:  # else the length is what it was
            headers = {"Inference-Header-Content-Length": str(len(data) - rng.choice((8, 12, rng.randrange(20))))}
        if rng.random() < 0.1:
            data, headers = bytearray(gzip.compress(data, 1)), headers | {"Content-Encoding": "gzip"}
        status, told = asked(service, bytes(data), headers)
        assert status == 200 or (status in CODES and status < 500), (data, told)
        assert status == 200 or set(told) == {"error", "type", "param", "code"}
        statuses.add(status)
    assert {200, 400} <= statuses
    assert [one for one in caplog.records if one.exc_info] == []
