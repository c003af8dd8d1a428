"""penstock.Client and AsyncClient: addresses, API keys, certificates, and busy services."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import pytest

from penstock import AsyncClient, Client, ServiceError
from penstock.errors import InvalidArgumentError
from penstock.serving.settings import GatewayLimits, GatewaySettings
from tests.support.errors import raises
from tests.support.http_service import KEY, SECONDS, address, until


@pytest.mark.parametrize("url", ["grpc://localhost", "grpc://localhost:1/v1", "grpcs://:1", "grpc://localhost:1?x"])
def test_invalid_grpc_urls_are_refused(url: str) -> None:
    with raises(InvalidArgumentError, param="url"):
        Client(url)


def test_api_keys_and_certificate_authorities(serve: Any, tmp_path: Any, certificate: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEY + "\n")
    keys.chmod(0o600)
    file, key = certificate
    settings = GatewaySettings(grpc_port=0, keys_file=keys, tls_certificate=file, tls_key=key)
    service = serve(settings=settings)
    port = service.grpc_address.rpartition(":")[2]
    inputs, options = {"text_input": ["the cat"]}, {"parameters": {"max_tokens": 2}}
    for url in (f"https://localhost:{service.address[1]}", f"grpcs://localhost:{port}"):
        with Client(url, api_key=KEY, tls_ca=file) as client:
            assert client.infer("fake", inputs, **options)["text_output"].shape == (1,)
        with Client(url, tls_ca=str(file), retries=0) as client, pytest.raises(ServiceError) as caught:
            client.infer("fake", inputs, **options)
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
        with Client(url, api_key=KEY, retries=0) as client, pytest.raises(ServiceError) as caught:
            client.infer("fake", inputs, timeout_s=20)
        assert caught.value.status == 0, "the certificate is not trusted"

        async def work(url: str) -> None:
            async with AsyncClient(url, api_key=KEY, tls_ca=file) as client:
                assert await client.servables.is_ready("fake")

        asyncio.run(work(url))
    with raises(InvalidArgumentError, param="tls_ca"):
        Client("http://localhost", tls_ca=file)
    with raises(InvalidArgumentError, param="tls_ca"):
        Client("https://localhost", tls_ca=tmp_path / "none").infer("x", {})


@pytest.mark.parametrize("way", ["bytes", "grpc"])
def test_refused_inference_is_retried(serve: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service refuses requests while another one is open."""
    monkeypatch.setattr("penstock.client.retries.MAX_PAUSE_S", 0.01)
    service = serve(settings=GatewaySettings(grpc_port=0, limits=GatewayLimits(num_open=1)))
    service.loop.call_soon_threadsafe(setattr, service.gateway.admission, "num_open", 1)
    until(lambda: service.num_open == 1)
    inputs, options = {"text_input": ["the cat"]}, {"parameters": {"max_tokens": 2}}
    with Client(address(service, way), retries=100) as client:
        with closing(Client(address(service, way), retries=1)) as hasty, pytest.raises(ServiceError) as caught:
            hasty.infer("fake", inputs, **options)
        assert (caught.value.status, caught.value.code) == (429, "too_many_requests")
        waiting = client.infer_async("fake", inputs, **options)
        service.loop.call_soon_threadsafe(setattr, service.gateway.admission, "num_open", 0)
        assert waiting.result(SECONDS)["text_output"].shape == (1,)


def test_refused_grpc_connection_has_status_0() -> None:
    import socket

    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        with (
            Client(f"grpc://127.0.0.1:{taken.getsockname()[1]}", retries=0) as client,
            pytest.raises(ServiceError) as caught,
        ):
            client.infer("x", {})
    assert caught.value.status == 0
