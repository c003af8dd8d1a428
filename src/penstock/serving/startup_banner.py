"""The text that a service prints when it is ready: addresses, models, memory, and a request to try."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.servables.lifecycle.repository import ServableRepository
    from penstock.serving.proto import wire_pb2 as pb
    from penstock.serving.service_settings import ServiceSettings
    from penstock.serving.workers.remote_model import RemoteBackend
    from penstock.serving.workers.remote_models import RemoteModels
    from penstock.tensors import ServedMethod

__all__ = ["startup_banner"]

_MIB: Final = 1 << 20
_MAX_OF_TRIAL: Final = 128
"""The most numbers in the example request: a longer command line does not help."""


def startup_banner(
    urls: Mapping[str, str],
    models: RemoteModels,
    servables: ServableRepository | None,
    settings: ServiceSettings,
    worker_port: int,
    max_files: int,
) -> str:
    """Return the text.  ``urls``: addresses by the names of the listeners.  ``max_files``: the limit on open files."""
    url, gateway, context_len = urls["http"], settings.gateway, settings.options.limits.context_len
    lines = [f"penstock {__version__} serves at {url}"]
    for backend in models.list():
        lines.append(f"  {backend.name}: {_described(backend, context_len)}")
        lines += [f"    memory of each worker: {_plan(plan)}" for plan in backend.plans()[:1]]
    methods = [] if servables is None else [*servables.list()]
    lines += [f"  {_method(method)}" for method in methods]
    if models.list():
        lines.append(f"  web page: {url}/   OpenAI's clients: base_url {url}/v1   metrics: {url}/metrics")
    if "grpc" in urls:
        tls = "" if gateway.tls_certificate is None else " with TLS"
        lines.append(f"  gRPC (Open Inference Protocol v2) at {urls['grpc']}{tls}")
    if "admin" in urls:
        lines.append(f"  admin socket for loading, updating and unloading models: {urls['admin']}")
    each = " each" if "grpc" in urls else ""
    lines.append(f"  up to {gateway.limits.num_connections:,} connections{each}; limit on open files: {max_files:,}")
    if worker_port:
        lines.append(f"  workers of other machines connect to port {worker_port}")
    trials: list[tuple[str, Any]] = []
    if models.list():
        trials.append(_request(models.list()[0]))
    trials += [method for method in map(_trial, methods) if method is not None][:1]
    key = " -H 'Authorization: Bearer KEY'" if gateway.keys_file is not None else ""
    for path, body in trials:
        data = shlex.quote(json.dumps(body))
        lines.append(f"  try: curl {url}{path}{key} -H 'Content-Type: application/json' -d {data}")
    return "\n".join(lines)


def _request(backend: RemoteBackend) -> tuple[str, Any]:
    """Return the path and body of a sample request for the model's task."""
    head = None if backend.tokenizer is None else backend.tokenizer.pooling_head
    if head is None and backend.card.has_chat_template:
        messages = [{"role": "user", "content": "Tell me a short story."}]
        return "/v1/chat/completions", {"model": backend.name, "messages": messages, "max_tokens": 32}
    if head is None:
        return "/v1/completions", {"model": backend.name, "prompt": "Once upon a time", "max_tokens": 32}
    if head.pair_format or len(head.labels) == 1:
        documents = ["The cat sat on the mat.", "Dogs bark."]
        return "/rerank", {"model": backend.name, "query": "Where is the cat?", "documents": documents}
    if head.task:
        return "/pooling", {"model": backend.name, "input": "Once upon a time"}
    return "/classify" if head.labels else "/v1/embeddings", {"model": backend.name, "input": "Once upon a time"}


def _method(method: ServedMethod) -> str:
    """Return a method's name, version, inputs and outputs; shapes are without the batch dimension."""
    inputs, outputs = (
        ", ".join(f"{tensor.name} {tensor.datatype}{[*tensor.shape[1:]]}" for tensor in ones)
        for ones in (method.inputs, method.outputs)
    )
    return f"{method.name}, version {method.version}: {inputs} -> {outputs}"


def _trial(method: ServedMethod) -> tuple[str, Any] | None:
    """Return an example request of one instance, or None if it would be too long."""
    tensors = []
    for tensor in method.inputs:
        shape = [1, *(max(1, size) for size in tensor.shape[1:])]
        count = math.prod(shape)
        if count > _MAX_OF_TRIAL:
            return None
        element: Any = {"BYTES": "hello", "BOOL": True}.get(tensor.datatype, 0)
        tensors.append({"name": tensor.name, "datatype": tensor.datatype, "shape": shape, "data": [element] * count})
    return f"/v2/models/{method.name}/infer", {"inputs": tensors}


def _described(backend: RemoteBackend, context_len: int) -> str:
    card, plans = backend.card, backend.plans()
    text = f"{card.source}, {card.network}, {card.scheme}, context {card.max_len}"
    if context_len > card.max_len:
        text += f" (the model's maximum; {context_len} requested)"
    if plans:
        workers = "1 worker" if len(plans) == 1 else f"{len(plans)} workers"
        threads = "1 thread" if plans[0].num_threads == 1 else f"{plans[0].num_threads} threads"
        if plans[0].num_ranks > 1:
            threads = f"{plans[0].num_ranks} ranks of {threads}"
        each = "" if len(plans) == 1 else " each"
        roles = Counter(worker.role for worker in backend.workers() if worker.role)
        if roles:
            workers += f" ({', '.join(f'{number} for {role}' for role, number in roles.items())})"
        text += f"; {workers}, {threads}{each}, up to {plans[0].max_requests} requests per step"
    return text


def _plan(plan: pb.Plan) -> str:
    other_bytes = plan.total_bytes - plan.weight_bytes - plan.kv_bytes
    return (
        f"{plan.total_bytes / _MIB:,.0f} MiB: weights {plan.weight_bytes / _MIB:,.0f}, KV cache "
        f"{plan.kv_bytes / _MIB:,.0f} ({plan.num_pages} pages of 32 tokens), other {other_bytes / _MIB:,.0f}"
    )
