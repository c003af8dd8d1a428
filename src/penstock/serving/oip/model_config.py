"""The configuration of a model in Triton's format: JSON over REST and messages over gRPC."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from penstock.json_schema import Choice, Flag, Items, Members, Shape, Text, Whole
from penstock.serving.oip.dispatch import check_version, found_method, model_called
from penstock.serving.oip.language import OUTPUTS, inputs_of
from penstock.tensors import DTYPES

if TYPE_CHECKING:
    from penstock.llm.backend import Backend
    from penstock.serving.call import Call
    from penstock.tensors import Method

__all__ = ["MODEL_CONFIG", "config"]

_TYPES: Final = {name: f"TYPE_{'STRING' if name == 'BYTES' else name}" for name in DTYPES}
_COUNT: Final = Whole(0, 2**63 - 1)
_NAMED: Final[dict[str, Shape]] = {
    "name": Text(),
    "data_type": Choice(tuple(_TYPES.values())),
    "dims": Items(Whole(-1, 2**63 - 1), 0, None),
}
_GROUP: Final[dict[str, Shape]] = {"name": Text(), "kind": Choice(("KIND_CPU",)), "count": _COUNT}
_BATCHING: Final[dict[str, Shape]] = {
    "preferred_batch_size": Items(_COUNT, 0, None),
    "max_queue_delay_microseconds": _COUNT,
    "default_queue_policy": Members("ModelQueuePolicy", {"allow_timeout_override": Flag(), "max_queue_size": _COUNT}),
}
_POLICY: Final[dict[str, Shape]] = {
    "latest": Members("LatestVersions", {"num_versions": _COUNT}),
    "all": Members("AllVersions", {}),
    "specific": Members("SpecificVersions", {"versions": Items(_COUNT, 0, None)}),
}
MODEL_CONFIG: Final = Members(
    "ModelConfig",
    {
        "name": Text(),
        "platform": Text(),
        "backend": Text(),
        "version_policy": Members("ModelVersionPolicy", _POLICY),
        "max_batch_size": _COUNT,
        "input": Items(Members("ModelInput", _NAMED, tuple(_NAMED)), 0, None),
        "output": Items(Members("ModelOutput", _NAMED, tuple(_NAMED)), 0, None),
        "instance_group": Items(Members("ModelInstanceGroup", _GROUP, tuple(_GROUP)), 0, None),
        "dynamic_batching": Members("ModelDynamicBatching", _BATCHING, tuple(_BATCHING)),
        "model_transaction_policy": Members("ModelTransactionPolicy", {"decoupled": Flag()}),
    },
    ("name", "platform", "backend", "version_policy", "max_batch_size", "input", "output", "instance_group"),
    {
        "max_batch_size": "Maximum instances per request. If it is above 0, dims omit the leading batch dimension.",
        "dynamic_batching": "Batching of the stage that statistics count; absent if it takes one instance at a time.",
        "model_transaction_policy": "decoupled: a request of a stream may have several responses.",
    },
)


def config(call: Call, name: str, version: str) -> dict[str, Any]:
    """Return the configuration of a servable's method or a language model.  Raises NotFoundError, UnavailableError."""
    method = found_method(call, name, version)
    if method is not None:
        return _of_method(method)
    backend = model_called(call, name)
    check_version(backend, version)
    return _of_backend(backend)


def _of_method(method: Method) -> dict[str, Any]:
    how = method.running
    found: dict[str, Any] = {
        "name": method.name, "platform": "penstock_servable", "backend": "penstock", "version_policy": how.policy,
        "max_batch_size": method.max_batch_size,
        "input": [_named(one.name, one.datatype, one.shape[1:]) for one in method.inputs],
        "output": [_named(one.name, one.datatype, one.shape[1:]) for one in method.outputs],
        "instance_group": [{"name": name, "kind": "KIND_CPU", "count": count} for name, count in how.processes.items()],
        "model_transaction_policy": {"decoupled": False},
    }  # fmt: skip
    if how.batch_sizes:
        found["dynamic_batching"] = {
            "preferred_batch_size": [*how.batch_sizes],
            "max_queue_delay_microseconds": int(how.max_delay_s * 1e6),
            "default_queue_policy": {"allow_timeout_override": True, "max_queue_size": how.max_waiting},
        }
    return found


def _of_backend(backend: Backend) -> dict[str, Any]:
    """Return the configuration of a language model; its shapes have no batch, because the engine makes batches."""
    name, datatype = inputs_of(backend.card)
    return {
        "name": backend.name, "platform": "penstock", "backend": "penstock",
        "version_policy": {"latest": {"num_versions": 1}}, "max_batch_size": 0,
        "input": [_named(name, datatype, (-1,))],
        "output": [_named(one, kind, (-1, -1) if one == "output_ids" else (-1,)) for one, kind in OUTPUTS.items()],
        "instance_group": [{"name": backend.name, "kind": "KIND_CPU", "count": len(backend.workers())}],
        "model_transaction_policy": {"decoupled": True},
    }  # fmt: skip


def _named(name: str, datatype: str, sizes: Iterable[int]) -> dict[str, Any]:
    return {"name": name, "data_type": _TYPES[datatype], "dims": [*sizes]}
