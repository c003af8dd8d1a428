"""The configuration of a model in Triton's format: JSON over REST and messages over gRPC."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from penstock.serving.oip.bodies import CONFIG_TYPES
from penstock.serving.oip.classifiers import signature_of
from penstock.serving.oip.dispatch import check_version, found_method, model_called

if TYPE_CHECKING:
    from penstock.llm.backend import Backend
    from penstock.serving.call import Call
    from penstock.tensors import ServedMethod

__all__ = ["config"]


def config(call: Call, name: str, version: str) -> dict[str, Any]:
    """Return the configuration of a servable's method or a language model.  Raises NotFoundError, UnavailableError."""
    method = found_method(call, name, version)
    if method is not None:
        return _of_method(method)
    backend = model_called(call, name)
    check_version(backend, version)
    return _of_backend(backend)


def _of_method(method: ServedMethod) -> dict[str, Any]:
    how = method.running
    description: dict[str, Any] = {
        "name": method.name, "platform": "penstock_servable", "backend": "penstock", "version_policy": how.policy,
        "max_batch_size": method.max_batch_size,
        "input": [_tensor_entry(tensor.name, tensor.datatype, tensor.shape[1:]) for tensor in method.inputs],
        "output": [_tensor_entry(tensor.name, tensor.datatype, tensor.shape[1:]) for tensor in method.outputs],
        "instance_group": [{"name": name, "kind": "KIND_CPU", "count": count} for name, count in how.processes.items()],
        "model_transaction_policy": {"decoupled": False},
    }  # fmt: skip
    if how.batch_sizes:
        description["dynamic_batching"] = {
            "preferred_batch_size": [*how.batch_sizes],
            "max_queue_delay_microseconds": int(how.max_delay_s * 1e6),
            "default_queue_policy": {"allow_timeout_override": True, "max_queue_size": how.max_waiting},
        }
    return description


def _of_backend(backend: Backend) -> dict[str, Any]:
    """Return the configuration of a language model or a classifier.

    Its shapes have no batch, because the engine makes batches.
    """
    signature = signature_of(backend)
    return {
        "name": backend.name, "platform": "penstock", "backend": "penstock",
        "version_policy": {"latest": {"num_versions": 1}}, "max_batch_size": 0,
        "input": [_tensor_entry(name, kind, (-1,)) for name, kind in signature.inputs],
        "output": [_tensor_entry(*output) for output in signature.outputs],
        "instance_group": [{"name": backend.name, "kind": "KIND_CPU", "count": len(backend.workers())}],
        "model_transaction_policy": {"decoupled": signature.is_stream},
    }  # fmt: skip


def _tensor_entry(name: str, datatype: str, sizes: Iterable[int]) -> dict[str, Any]:
    return {"name": name, "data_type": CONFIG_TYPES[datatype], "dims": [*sizes]}
