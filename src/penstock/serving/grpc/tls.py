"""TLS for gRPC servers, with certificates that can be replaced while the server runs."""

from __future__ import annotations

from typing import Any

import grpc

__all__ = ["GrpcTls"]


class GrpcTls:
    """Server credentials with a key and a certificate chain, both in PEM."""

    def __init__(self, key: bytes, certificate: bytes) -> None:
        self._next: Any = None
        first = grpc.ssl_server_certificate_configuration([(key, certificate)])
        self.credentials = grpc.dynamic_ssl_server_credentials(first, self._fetch)

    def replace(self, key: bytes, certificate: bytes) -> None:
        """Use another certificate, starting with the next handshake."""
        self._next = grpc.ssl_server_certificate_configuration([(key, certificate)])

    def _fetch(self) -> Any:
        """Return the new configuration, or None for no change; gRPC calls this at each handshake."""
        credentials, self._next = self._next, None
        return credentials
