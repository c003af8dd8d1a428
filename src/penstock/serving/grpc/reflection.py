"""gRPC's server reflection: lists the services, and returns the files that describe them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

from penstock.serving.grpc.gateway import GrpcCall, GrpcMethod
from penstock.serving.proto import health_pb2, oip_pb2
from penstock.serving.proto import reflection_pb2 as pb

__all__ = ["reflection_methods"]

NAMES: Final = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""Both names have the same messages; older clients use the second."""
_FILES: Final = (oip_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, pb.DESCRIPTOR)
_NOT_FOUND: Final = 5
_INVALID: Final = 3
MAX_REQUESTS: Final = 1000


def reflection_methods() -> list[GrpcMethod]:
    """Return the only method, under both names of the service."""
    return [
        GrpcMethod(f"/{name}/ServerReflectionInfo", pb.ServerReflectionRequest, _info, is_stream=True) for name in NAMES
    ]


async def _info(call: GrpcCall) -> None:
    """Answer requests in order."""
    for _ in range(MAX_REQUESTS):
        data = await call.next()
        if data is None:
            return
        request = await call.parsed(data)
        response = pb.ServerReflectionResponse(valid_host=request.host, original_request=request)
        _answer(request, response)
        await call.write(response)


def _answer(request: pb.ServerReflectionRequest, response: pb.ServerReflectionResponse) -> None:
    kind = request.WhichOneof("message_request")
    file_proto: Any = None
    if kind == "list_services":
        names = sorted(service.full_name for file in _FILES for service in file.services_by_name.values())
        response.list_services_response.service.extend(pb.ServiceResponse(name=name) for name in names)
        return
    if kind == "file_by_filename":
        file_proto = next((file for file in _FILES if file.name == request.file_by_filename), None)
    elif kind == "file_containing_symbol":
        file_proto = _file_of(request.file_containing_symbol)
    elif kind is None:
        response.error_response.error_code = _INVALID
        response.error_response.error_message = "The request has no message_request."
        return
    if file_proto is None:  # includes requests for extensions: these files define none
        response.error_response.error_code = _NOT_FOUND
        response.error_response.error_message = "No file or symbol has that name."
        return
    response.file_descriptor_response.file_descriptor_proto.append(file_proto.serialized_pb)


def _file_of(symbol: str) -> Any:
    """Return the file of a service, method, message, field or enumeration, given its full name."""
    for file in _FILES:
        with suppress(KeyError):
            return file.pool.FindFileContainingSymbol(symbol)  # each file has a pool of its own
    return None
