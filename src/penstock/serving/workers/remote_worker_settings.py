"""Settings of the port where workers of other machines join."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RemoteWorkerSettings"]


@dataclass(frozen=True)
class RemoteWorkerSettings:
    """Address and secrets of the port where workers of other machines join.

    ``certificate`` and ``key`` are in PEM, and each worker proves itself with ``token``.  Port 0 takes a free one.
    """

    host: str
    port: int
    certificate: bytes
    key: bytes
    token: str
