"""Sockets that listen: for every kind of listener, "::" means the addresses of both families."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from penstock.errors import FileAccessError
from penstock.processes.listen import open_port, peer_address
from penstock.runtime.ranks.stage_server import StageServer, listen_for_stages, reserved_port

TOKEN = "0123456789abcdef" * 3


@pytest.fixture
def has_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")


def stages_at(host: str, port: int = 0) -> StageServer:
    return StageServer(host, port, Path("certificate"), Path("key"), TOKEN)


def check_both_families(listener: socket.socket) -> None:
    with listener:
        listener.settimeout(60)
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, port), timeout=60):
                connection, peer = listener.accept()
                connection.close()
                assert peer_address(peer) == f"{host}:{peer[1]}"


@pytest.mark.usefixtures("has_ipv6")
def test_any_address_is_that_of_both_families() -> None:
    check_both_families(open_port("::", 0, 8))
    check_both_families(listen_for_stages(stages_at("::")))


@pytest.mark.usefixtures("has_ipv6")
def test_a_reserved_port_is_that_of_both_families() -> None:
    with reserved_port(stages_at("::")) as server:
        check_both_families(listen_for_stages(server))


def test_a_name_is_an_address_of_ipv4_if_it_has_one() -> None:
    with open_port("localhost", 0, 8) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(("host", "field"), [("127.0.0.1", "stage_port"), ("no.such.host.invalid", "stage_host")])
def test_an_address_that_cannot_be_used_is_named(host: str, field: str) -> None:
    with open_port("127.0.0.1", 0, 8) as other, pytest.raises(FileAccessError) as raised:
        listen_for_stages(stages_at(host, other.getsockname()[1]))
    assert raised.value.param == field
