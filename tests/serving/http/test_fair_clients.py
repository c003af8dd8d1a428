"""A client with one request does not wait behind all the requests of another: by key, by address, over gRPC."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock import Client
from penstock.engine.options import EngineOptions, RequestOptions
from penstock.serving.keys import ApiKeys, KeySet
from penstock.serving.settings import GatewaySettings
from penstock.serving.workers.messages import options_from, options_to
from tests.support.http_service import SECONDS, Service, until

NUM_BUSY, NEW = 20, 99
KEYS = ("a-key-of-the-busy-one", "a-key-of-the-new-one")


@contextmanager
def held(service: Service) -> Iterator[list[int]]:
    """Steps wait until the block ends; gives the prompts' first tokens in the order in which they run."""
    program, goes_on, ran = service.llms["fake"].engine.program, threading.Event(), []
    run = program.run

    def slow(batch: Any) -> None:
        goes_on.wait(SECONDS)
        ran.append(int(batch.token_ids[0]))
        run(batch)

    program.run = slow
    try:
        yield ran
    finally:
        goes_on.set()


def order_of(service: Service, busy: Callable[[int], object], new: Callable[[int], object]) -> list[int]:
    """The order in which NUM_BUSY requests of one client run, and one of another that comes after them."""
    with ThreadPoolExecutor(NUM_BUSY + 1) as threads:
        with held(service) as ran:
            asked = [threads.submit(busy, 10 + i) for i in range(NUM_BUSY)]
            until(lambda: service.llms["fake"].engine._num_submitted == NUM_BUSY)
            asked.append(threads.submit(new, NEW))
            until(lambda: service.llms["fake"].engine._num_submitted == NUM_BUSY + 1)
        for one in asked:
            one.result(SECONDS)
    assert len(ran) == NUM_BUSY + 1
    return ran


def over_http(service: Service, key: str = "", source: str = "127.0.0.1") -> Callable[[int], object]:
    def ask(token: int) -> None:
        connection = http.client.HTTPConnection(*service.address, timeout=SECONDS, source_address=(source, 0))
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection.request("POST", "/v1/completions", json.dumps({"prompt": [token], "max_tokens": 1}), headers)
        status = connection.getresponse().status
        connection.close()
        assert status == 200, f"status {status}"

    return ask


def over_grpc(service: Service, key: str) -> Callable[[int], object]:
    def ask(token: int) -> None:
        with Client(f"grpc://{service.grpc_address}", api_key=key) as client:
            client.infer("fake", {"input_ids": [[token]]}, parameters={"max_tokens": 1})

    return ask


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("\n".join(KEYS) + "\n")
    file.chmod(0o600)
    return file


@pytest.mark.parametrize("way", [over_http, over_grpc])
def test_two_keys_have_equal_shares(way: Callable[..., Any], serve: Any, key_file: Path) -> None:
    service = serve(settings=GatewaySettings(grpc_port=0, keys_file=key_file), max_requests=1)
    ran = order_of(service, way(service, KEYS[0]), way(service, KEYS[1]))
    assert ran.index(NEW) <= 2, ran


def test_two_addresses_have_equal_shares_without_keys(serve: Any) -> None:
    service = serve(max_requests=1)
    ran = order_of(service, over_http(service), over_http(service, source="127.0.0.2"))
    assert ran.index(NEW) <= 2, ran


def test_one_key_is_one_client_from_any_address(serve: Any, key_file: Path) -> None:
    service = serve(settings=GatewaySettings(keys_file=key_file), max_requests=1)
    ran = order_of(service, over_http(service, KEYS[0]), over_http(service, KEYS[0], "127.0.0.2"))
    assert ran.index(NEW) == NUM_BUSY, ran


def test_unchecked_keys_get_no_share_of_their_own(serve: Any) -> None:
    service = serve(max_requests=1)
    ran = order_of(service, over_http(service), over_http(service, "a-key-made-up-for-a-share"))
    assert ran.index(NEW) == NUM_BUSY, ran


def test_a_full_queue_answers_another_clients_first(serve: Any) -> None:
    service = serve(max_requests=1, options=EngineOptions(max_waiting=6))
    busy, new = over_http(service), over_http(service, source="127.0.0.2")
    with ThreadPoolExecutor(8) as threads:
        with held(service) as ran:
            asked = [threads.submit(busy, 10 + i) for i in range(7)]
            until(lambda: service.llms["fake"].engine._num_submitted == 7)
            assert service.ask("POST", "/v1/completions", {"prompt": [1]})[0] == 429
            first = threads.submit(new, NEW)
            until(lambda: service.llms["fake"].engine._num_submitted == 8)
        first.result(SECONDS)
        refused = [one.exception(SECONDS) for one in asked]
    assert ran.index(NEW) <= 2
    assert ["status 429" in str(one) for one in refused if one is not None] == [True]


def test_a_client_is_a_hash_or_an_address() -> None:
    keyless, keyed = ApiKeys(), ApiKeys(KeySet([*KEYS]))
    first, second = (keyed.client_of(f"Bearer {key}".encode(), "10.0.0.1") for key in KEYS)
    assert first != second
    assert KEYS[0] not in first
    assert len(first) <= 64
    assert keyless.client_of(b"Bearer anything", "10.0.0.1") == "10.0.0.1"
    assert keyless.client_of(None, "::ffff:10.0.0.1") == "10.0.0.1"
    assert keyless.client_of(None, "2001:db8:1:2:3:4:5:6") == "2001:db8:1:2::/64"
    assert keyless.client_of(None, "fe80::1%eth0") == "fe80::/64"
    assert keyless.client_of(None, "") == ""


def test_the_client_goes_to_the_worker() -> None:
    options = RequestOptions(priority=2, client="key 0123")
    assert options_from(options_to(options)) == options
