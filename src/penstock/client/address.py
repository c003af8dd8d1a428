"""The address of a service and the options of its connections, validated once."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from penstock.errors import InvalidArgumentError

__all__ = ["Address"]

_MAX_TIMEOUT_S: Final = 1e6
_MAX_RETRIES: Final = 100


@dataclass(frozen=True)
class Address:
    """A service's URL, with the API key, timeout, retries and trusted certificates of a client."""

    url: str
    api_key: str | None = None
    timeout_s: float = 600.0
    retries: int = 2
    tls_ca: str | Path | None = None
    host: str = field(init=False)
    port: int = field(init=False)
    is_tls: bool = field(init=False)
    is_grpc: bool = field(init=False)
    prefix: str = field(init=False)

    def __post_init__(self) -> None:
        """Split the URL.  Raises InvalidArgumentError for an invalid option."""
        parts = urlsplit(self.url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        is_http, is_grpc = parts.scheme in ("http", "https"), parts.scheme in ("grpc", "grpcs")
        if not (is_http or is_grpc) or not parts.hostname or port == -1 or parts.query or parts.username:
            raise InvalidArgumentError(
                f"url: expected http://HOST:PORT or grpc://HOST:PORT, got {self.url!r:.200}", param="url"
            )
        if is_grpc and (port is None or parts.path.strip("/")):
            raise InvalidArgumentError(
                f"url: expected grpc://HOST:PORT without a path, got {self.url!r:.200}", param="url"
            )
        key = self.api_key
        if key is not None and (not isinstance(key, str) or re.fullmatch(r"[!-~]+", key) is None):
            raise InvalidArgumentError(
                "api_key: expected a string of printable ASCII characters without spaces", param="api_key"
            )
        if type(self.timeout_s) not in (int, float) or not 0 < self.timeout_s <= _MAX_TIMEOUT_S:
            raise InvalidArgumentError(
                f"timeout_s: expected seconds above 0 and at most {_MAX_TIMEOUT_S:g}, got {self.timeout_s!r}",
                param="timeout_s",
            )
        if type(self.retries) is not int or not 0 <= self.retries <= _MAX_RETRIES:
            raise InvalidArgumentError(
                f"retries: expected an integer from 0 to {_MAX_RETRIES}, got {self.retries!r}", param="retries"
            )
        is_tls = parts.scheme in ("https", "grpcs")
        if self.tls_ca is not None and not is_tls:
            raise InvalidArgumentError(
                f"tls_ca: expected an https:// or grpcs:// url with it, got {self.url!r:.200}", param="tls_ca"
            )
        values = {
            "host": parts.hostname, "port": port or (443 if is_tls else 80), "is_tls": is_tls, "is_grpc": is_grpc,
            "prefix": parts.path.rstrip("/").removesuffix("/v1"),
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def authority(self) -> str:
        """Host and port; an IPv6 address stands in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def base_url(self) -> str:
        """The URL that the paths of requests are appended to."""
        return f"{'https' if self.is_tls else 'http'}://{self.authority}{self.prefix}"

    @cached_property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS context, which trusts ``tls_ca``, or the system's authorities without it; None without TLS."""
        if not self.is_tls:
            return None
        try:
            return ssl.create_default_context(cafile=self.tls_ca)
        except (OSError, ssl.SSLError) as error:
            raise InvalidArgumentError(
                f"tls_ca: cannot read {self.tls_ca}: {error.strerror or error}", param="tls_ca"
            ) from None
