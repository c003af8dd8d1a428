"""What the door of the service allows: addresses, sizes, times."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from penstock.errors import InvalidArgumentError

__all__ = ["GatewayLimits", "GatewaySettings", "is_loopback"]

_ORIGIN: Final = re.compile(r"https?://[^/A-Z\s]+")
_HOST: Final = re.compile(r"\*|[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")
LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")
MAX_KEYS: Final = 10_000


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this machine alone."""
    if host == "localhost":
        return True
    return _is_address(host) and ip_address(host).is_loopback  # a name is none, whatever it begins with


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class GatewayLimits:
    """Sizes in bytes, times in seconds.

    ``body_bytes`` and ``header_bytes`` of one request; ``num_headers``.  ``header_s`` and ``body_s`` to send them in;
    ``write_s`` for a reader to take a piece of an answer; ``keep_alive_s`` between requests of one connection;
    ``request_s`` for a whole answer, unless the request's own ``timeout`` is shorter.  ``num_connections`` at once;
    ``num_open`` requests at once.
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
        """Refuse limits that would let nothing in."""
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1 << 40:
                raise InvalidArgumentError(f"{name} must be a number above 0, not {value!r}", param=name)


@dataclass(frozen=True)
class GatewaySettings:
    """Where the service listens and to whom it answers.

    ``port`` 0 takes a free one.  ``keys_file`` holds API keys, one a line; without it nobody is asked for one, which
    is refused for a ``host`` that others reach unless ``insecure``.  ``hosts`` are further names for the Host header,
    "*" for any; ``origins`` are pages of other hosts that browsers may call from.  ``tls_certificate`` and ``tls_key``
    are PEM files.  ``grpc_port``: where gRPC is spoken, at the same host; None: nowhere.  ``admin_keys_file`` holds
    the keys of those who may load and unload servables over it; None: nobody may.
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

    def __post_init__(self) -> None:
        """Refuse what would open the service to the world, or not at all."""
        for name, port in (("port", self.port), ("grpc_port", 0 if self.grpc_port is None else self.grpc_port)):
            if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
                raise InvalidArgumentError(f"{name} must be a whole number from 0 to 65535, not {port!r}", param=name)
        if not is_loopback(self.host) and self.keys_file is None and not self.insecure:
            raise InvalidArgumentError(
                f"host {self.host} is reached by others: give --api-key-file, or --insecure to serve everybody",
                param="host",
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            present, missing = ("tls_certificate", "tls_key")[:: 1 if self.tls_key is None else -1]
            raise InvalidArgumentError(f"{present} must be given together with {missing}", param=present)
        for name in self.hosts:
            if _HOST.fullmatch(name) is None or (":" in name and not _is_address(name)):
                raise InvalidArgumentError(
                    f"allowed host {name!r:.200} can match nothing: expected a name without a port", param="hosts"
                )
        for origin in self.origins:
            if _ORIGIN.fullmatch(origin) is None:
                raise InvalidArgumentError(
                    f"origin {origin!r} can match no page: expected https://host or https://host:port, in lower case",
                    param="origins",
                )

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """Names that the Host header may have; empty for any."""
        if "*" in self.hosts:
            return ()
        if is_loopback(self.host):
            return (*LOOPBACK_NAMES, self.host, *self.hosts)
        return (self.host, *LOOPBACK_NAMES, *self.hosts) if self.hosts else ()
