"""gRPC's standard health service: the name "" stands for the whole service, other names for models and servables.

The package grpcio-health-checking is not used: its servicer knows no keys and keeps statuses that someone must set, and
its messages need the newest protobuf, which other packages exclude.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from penstock.api_errors import RefusalError
from penstock.errors import NotFoundError, UnavailableError
from penstock.serving.grpc.gateway import KEY_HINT, GrpcCall, GrpcMethod
from penstock.serving.oip.state import is_model_ready
from penstock.serving.proto import health_pb2 as pb

if TYPE_CHECKING:
    from penstock.serving.call import Call

__all__ = ["HealthMethods"]

SERVICE: Final = pb.DESCRIPTOR.services_by_name["Health"].full_name
MAX_WATCHERS: Final = 256
_LOOK_S: Final = 0.2


class HealthMethods:
    """Check and Watch.  Like ``/health/ready`` they need no key, except for the health of a named model."""

    def __init__(self) -> None:
        self._num_watchers = 0

    def methods(self) -> list[GrpcMethod]:
        """Return the methods of the service."""
        return [
            GrpcMethod(f"/{SERVICE}/Check", pb.HealthCheckRequest, self._check, is_open=True),
            GrpcMethod(f"/{SERVICE}/Watch", pb.HealthCheckRequest, self._watch, is_many=True, is_open=True),
        ]

    async def _check(self, call: GrpcCall) -> pb.HealthCheckResponse:
        name = _name(call)
        status = _status(call.request, name)
        if status == pb.HealthCheckResponse.SERVICE_UNKNOWN:
            raise NotFoundError(f"Model {name[:128]!r} not found.")
        return pb.HealthCheckResponse(status=status)

    async def _watch(self, call: GrpcCall) -> None:
        """Write each change until the client leaves or the service stops."""
        name, last, stopping = _name(call), None, call.gateway.stopping
        most = MAX_WATCHERS if call.is_known else MAX_WATCHERS // 2  # clients without a key may use half
        if self._num_watchers >= most:
            raise RefusalError(429, f"Too many watching clients (limit {most}).", code="too_many_requests")
        self._num_watchers += 1
        try:
            while not stopping.is_set():
                status = _status(call.request, name)
                if status != last:
                    await call.write(pb.HealthCheckResponse(status=status))
                    last = status
                await asyncio.sleep(_LOOK_S)
        finally:
            self._num_watchers -= 1
        raise RefusalError(503, "The service is stopping.", code="draining")


def _name(call: GrpcCall) -> str:
    name: str = call.message.service
    if name:
        call.gateway.admission.check_key(call.request, KEY_HINT)
    return name


def _status(call: Call, name: str) -> pb.HealthCheckResponse.ServingStatus:
    try:
        is_ready = is_model_ready(call, name, "") if name else call.is_ready()
    except NotFoundError:
        return pb.HealthCheckResponse.SERVICE_UNKNOWN
    except UnavailableError:
        is_ready = False
    return pb.HealthCheckResponse.SERVING if is_ready else pb.HealthCheckResponse.NOT_SERVING
