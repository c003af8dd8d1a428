"""The settings of the gateway: addresses, keys, and limits on sizes and times."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from penstock.config import check_integer, check_number
from penstock.errors import InvalidArgumentError
from penstock.text.answer.formats import find_reasoning_format, find_tool_format

__all__ = ["GatewayLimits", "GatewaySettings", "is_loopback"]

_ORIGIN: Final = re.compile(r"https?://[^/A-Z\s]+")
_HOST: Final = re.compile(r"\*|[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")
LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Return True if an address to listen on can be reached only from this machine."""
    if host == "localhost":
        return True
    return _is_address(host) and ip_address(host).is_loopback  # False for other names, even for 127.example.com


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class GatewayLimits:
    """Limits of the gateway: sizes in bytes, times in seconds.

    ``body_bytes``, ``header_bytes``, ``num_headers``: sizes of one request.  ``header_s``, ``body_s``: time for the
    client to send headers and body.  ``write_s``: time for the client to read a chunk of a response.
    ``keep_alive_s``: time between the requests of a connection.  ``request_s``: time for a whole response, unless the
    request's ``timeout`` is shorter.  ``num_connections``: connections at a time.  ``num_open``: requests at a time.
    """

    body_bytes: int = 8 << 20
    header_bytes: int = 32 << 10
    num_headers: int = 100
    header_s: float = 10.0
    body_s: float = 30.0
    write_s: float = 30.0
    keep_alive_s: float = 60.0
    request_s: float = 3600.0
    num_connections: int = 4096
    num_open: int = 1024

    def __post_init__(self) -> None:
        """Check that each limit is a positive number."""
        for name, value in vars(self).items():
            check_number(name, value, 1 << 40)


@dataclass(frozen=True)
class GatewaySettings:
    """Addresses, keys and limits of the gateway.

    ``host``: the address to listen on.  ``port``: 0 picks a free one.  ``insecure``: allow a ``host`` that other
    machines can reach without keys.  ``limits``: sizes and times.  ``keys_file``: a file of API keys, one per line;
    None disables keys, which requires ``insecure`` if ``host`` is reachable from other machines.  ``hosts``: further
    accepted names in the Host header, "*" for any.  ``origins``: origins of other hosts whose pages may call the
    service.  ``tls_certificate``, ``tls_key``: PEM files.  ``grpc_port``: the port of gRPC on the same host; None
    disables gRPC.  ``admin_keys_file``: a file of keys that may load and unload servables; None disables these
    operations.  ``tool_format``, ``reasoning_format``: how models write tool calls and thoughts; "auto" for the format
    of each model's chat template, "none" to leave them in the content.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys_file: Path | None = None
    insecure: bool = False
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    grpc_port: int | None = None
    admin_keys_file: Path | None = None
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    tool_format: str = "auto"
    reasoning_format: str = "auto"

    def __post_init__(self) -> None:
        """Check the fields; refuse a public address without keys."""
        for name, port in (("port", self.port), ("grpc_port", 0 if self.grpc_port is None else self.grpc_port)):
            check_integer(name, port, 0, 65535)
        find_tool_format(self.tool_format, "")
        find_reasoning_format(self.reasoning_format, "")
        if not is_loopback(self.host) and self.keys_file is None and not self.insecure:
            raise InvalidArgumentError(
                f"host {self.host} is reachable from other machines. Set --api-key-file, or --insecure to run without.",
                param="host",
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            present, missing = ("tls_certificate", "tls_key")[:: 1 if self.tls_key is None else -1]
            raise InvalidArgumentError(f"{present} must be given together with {missing}", param=present)
        for name in self.hosts:
            if _HOST.fullmatch(name) is None or (":" in name and not _is_address(name)):
                raise InvalidArgumentError(
                    f"allowed host {name!r:.200} can never match. Expected a name without a port.", param="hosts"
                )
        for origin in self.origins:
            if _ORIGIN.fullmatch(origin) is None:
                raise InvalidArgumentError(
                    f"origin {origin!r} can never match. Expected https://host or https://host:port in lower case.",
                    param="origins",
                )

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """The accepted names in the Host header; empty for any."""
        if "*" in self.hosts:
            return ()
        if is_loopback(self.host):
            return (*LOOPBACK_NAMES, self.host, *self.hosts)
        return (self.host, *LOOPBACK_NAMES, *self.hosts) if self.hosts else ()
