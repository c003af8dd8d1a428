"""Pages of other origins, clients of HTTP/1.0, and clients of both families of addresses."""

from __future__ import annotations

import http.client
import json
import socket

import pytest

from penstock.serving.settings import GatewaySettings

PAGE = "https://page.example"
STAINLESS = "authorization,content-type,x-stainless-lang,x-stainless-os, OpenAI-Beta"
DEFAULT = "authorization, content-type, x-request-id"


def preflight(service, path="/v1/chat/completions", **headers):
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"} | headers
    return service.ask("OPTIONS", path, headers=asked)


def test_a_preflight_allows_the_headers_that_it_names(serve):
    service = serve("fake", settings=GatewaySettings(origins=(PAGE,)))
    status, headers, _ = preflight(service, **{"Access-Control-Request-Headers": STAINLESS})
    assert (status, headers["access-control-allow-headers"]) == (204, STAINLESS)
    assert headers["access-control-allow-origin"] == PAGE
    assert preflight(service)[1]["access-control-allow-headers"] == DEFAULT
    for names in ("a b", "a,,b", "a\tb", "a:b", "\u00e9"):
        found = preflight(service, **{"Access-Control-Request-Headers": names})[1]
        assert found["access-control-allow-headers"] == DEFAULT
    asked = {"Access-Control-Request-Headers": STAINLESS, "Origin": "https://other.example"}
    status, headers, _ = preflight(service, **asked)
    assert status == 403
    assert not [name for name in headers if name.startswith("access-control")]
    status, headers, _ = service.ask("GET", "/v1/models", headers={"Origin": PAGE})
    assert "x-request-id" in headers["access-control-expose-headers"]


def old(service, path, head=b""):
    """The status of a request of HTTP/1.0 and the code of its error."""
    with service.connect() as connection:
        connection.sendall(b"GET " + path.encode() + b" HTTP/1.0\r\n" + head + b"\r\n")
        response = http.client.HTTPResponse(connection)
        response.begin()
        body = json.loads(response.read())
    error = body.get("error")
    return response.status, error["code"] if isinstance(error, dict) else error and body["code"]


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"])
def test_health_checks_need_no_host(serve, path):
    assert old(serve("fake"), path) == (200, None)


def test_other_routes_need_a_host_where_names_are_checked(serve):
    service = serve("fake")
    assert old(service, "/v1/models") == (400, "invalid_header")
    assert old(service, "/v1/models", b"Host: localhost\r\n") == (200, None)
    assert old(service, "/health", b"Host: evil.example\r\n") == (403, "host_not_allowed")
    with service.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
    assert old(serve("fake", settings=GatewaySettings(hosts=("*",))), "/v1/models") == (200, None)


@pytest.mark.parametrize("path", ["/", "/health", "/v1/chat/completions"])
def test_options_without_an_origin_lists_the_methods(serve, path):
    """Load balancers ask OPTIONS / of HTTP/1.0 by default, without any header."""
    service = serve("fake")
    for request in (b" HTTP/1.0\r\n\r\n", b" HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        with service.connect() as connection:
            connection.sendall(b"OPTIONS " + path.encode() + request)
            response = http.client.HTTPResponse(connection, method="HEAD")
            response.begin()
            assert response.status == 204
            assert response.headers["allow"] == ("POST" if "chat" in path else "GET, HEAD")
            assert not [name for name in response.headers if name.lower().startswith("access-control")]
    assert service.ask("OPTIONS", "/none")[0] == 404


def test_any_address_is_that_of_both_families(serve):
    try:
        socket.create_server(("::", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    service = serve("fake", settings=GatewaySettings(host="::", port=0, insecure=True))
    port = int(service.url.rpartition(":")[2])
    for host in ("127.0.0.1", "::1"):
        connection = http.client.HTTPConnection(host, port, timeout=60)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
