"""The life of a service: open its listeners, load its models and servables, serve, drain and stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TextIO

from penstock.errors import InvalidFileError
from penstock.logs import note, tell
from penstock.serving.http.listener import Listener, check_tls
from penstock.serving.http.open_files import fitting_connections, raise_limit
from penstock.serving.model_changes import Changes
from penstock.serving.service_settings import ServiceSettings
from penstock.serving.settings import GatewaySettings
from penstock.serving.startup_banner import startup_banner
from penstock.serving.workers.primary import Primary
from penstock.serving.workers.remote_model import RemoteBackend
from penstock.serving.workers.remote_models import RemoteModels

if TYPE_CHECKING:
    from penstock.servables.lifecycle.repository import ServableRepository
    from penstock.serving.arrivals import Arrivals
    from penstock.serving.grpc.listener import GrpcListener
    from penstock.serving.metrics import Metrics
    from penstock.serving.traces import Traces

__all__ = ["run_service"]

_DESCRIPTORS_OF_WORKER: Final = 8
"""File descriptors in this process per worker: its standard input and its socket, twice during a replacement."""
_DESCRIPTORS_OF_SERVABLES: Final = 128
"""File descriptors reserved for the processes of a folder of servables."""


class _Signals:
    """Handles SIGTERM and SIGINT: the first drains, the second stops at once.  SIGHUP reloads keys and TLS files.

    A signal that was ignored when the process started stays ignored.
    """

    def __init__(self, on_second: Callable[[], None], reload: Callable[[], None]) -> None:
        self.first: signal.Signals | None = None
        self.received = asyncio.Event()
        self._on_second = on_second
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        self._taken = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        for number in self._taken:
            loop.add_signal_handler(number, self._take, number)
        loop.add_signal_handler(signal.SIGHUP, reload)

    def _take(self, number: signal.Signals) -> None:
        if self.first is None:
            self.first = number
            self.received.set()
        else:
            self._on_second()

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (*self._taken, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def run_service(settings: ServiceSettings) -> int:
    """Serve until a signal arrives, then drain; return the exit status.

    Raises the error of opening an address or loading a model, after everything that was started has been stopped.
    """
    limit = raise_limit()
    settings = _within(settings, limit)
    primary = Primary(settings.supervision, settings.worker_listener, settings.placement)
    models = _models(primary, settings)
    primary.adopt = models.adopt
    servables = _servables(models, primary, settings)
    traces = _traces(settings)
    listeners, changes, metrics = _listeners(models, servables, settings, traces, primary.arrivals)
    stop_now = asyncio.Event()

    def hurry() -> None:
        stop_now.set()
        for listener in listeners.values():
            listener.stop(at_once=True)

    signals = _Signals(hurry, lambda: _reload(listeners, primary, settings.gateway))
    tasks: list[asyncio.Future[Any]] = []
    try:
        await primary.open()
        urls = {name: listener.open() for name, listener in listeners.items()}
        serving = asyncio.gather(*(listener.serve() for listener in listeners.values()))
        signalled = asyncio.ensure_future(signals.received.wait())
        loading = asyncio.ensure_future(_load(models, servables, settings))
        tasks += [serving, signalled, loading, asyncio.ensure_future(metrics.history.run())]
        await asyncio.wait((serving, signalled, loading), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            gc.freeze()  # the objects of the start-up live on: scanning them in each full collection would take 0.1 s
            _say(startup_banner(urls, models, servables, settings, primary.port, limit), sys.stdout)
            await asyncio.wait((serving, signalled), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        if signals.first is not None:
            note("penstock", f"{signals.first.name}. Stopping: waiting for open requests.")
        loading.cancel()
        await changes.close()
        await _drain(models, servables, stop_now)
        for listener in listeners.values():
            listener.stop()
        await serving
        return 130 if signals.first is signal.SIGINT else 0
    finally:
        hurry()
        await changes.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in listeners.values():
            listener.close()
        await _stop(models, servables)
        await primary.close()
        if traces is not None:
            await asyncio.to_thread(traces.close)
        signals.close()


def _models(primary: Primary, settings: ServiceSettings) -> RemoteModels:
    return RemoteModels(
        primary,
        settings.options,
        settings.num_workers,
        settings.networks,
        settings.route_policy,
        settings.scale,
        settings.roles,
    )


def _within(settings: ServiceSettings, limit: int) -> ServiceSettings:
    """Return the settings with ``num_connections`` reduced to what the limit on open files allows."""
    gateway = settings.gateway
    num_workers = settings.num_workers if settings.scale is None else settings.scale.max_replicas
    others = _DESCRIPTORS_OF_WORKER * num_workers * max(1, len(settings.models))
    others += _DESCRIPTORS_OF_SERVABLES * len(settings.servables)
    if settings.admin_socket is not None:
        from penstock.serving.http import admin

        others += admin.MAX_CONNECTIONS
    if settings.worker_listener is not None:
        from penstock.serving.workers.machines import remote_worker_server

        others += remote_worker_server.MAX_CONNECTIONS
    num_listeners = 1 if gateway.grpc_port is None else 2
    fitting = fitting_connections(gateway.limits.num_connections, limit, num_listeners, others)
    return replace(settings, gateway=replace(gateway, limits=replace(gateway.limits, num_connections=fitting)))


def _reload(listeners: Mapping[str, Listener | GrpcListener], primary: Primary, settings: GatewaySettings) -> None:
    """Read keys, certificate and TLS key again; an invalid file is logged, and the old contents stay in use."""
    public = listeners["http"]
    if isinstance(public, Listener):
        public.gateway.admission.keys.reread()
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None or key is None:
        return
    try:
        check_tls(settings)
        for name, listener in listeners.items():
            if name != "admin":
                listener.reload_tls()
        primary.reload_tls()
    except (OSError, InvalidFileError) as error:
        message = f"Failed to reload the TLS certificate. The old one stays in use: {error}"
        tell("reload_failed", message, logging.ERROR, file=str(certificate))
        return
    tell("reloaded", f"Reloaded the TLS certificate {certificate}.", file=str(certificate))


def _say(text: str, where: TextIO) -> None:
    """Print a text; a full disk or a closed pipe must not end the service."""
    with suppress(OSError):
        print(text, file=where, flush=True)


def _traces(settings: ServiceSettings) -> Traces | None:
    if not settings.otlp_traces_endpoint:
        return None
    from penstock.serving.traces import Traces

    return Traces(settings.otlp_traces_endpoint)


def _servables(models: RemoteModels, primary: Primary, settings: ServiceSettings) -> ServableRepository | None:
    if not settings.servables:
        return None
    from penstock.servables.lifecycle.repository import ServableRepository
    from penstock.serving.workers.private_models import PrivateModels

    def make(name: str, scheme: str | None) -> RemoteBackend:
        options = settings.options if scheme is None else replace(settings.options, scheme=scheme)
        return RemoteBackend(
            name, primary, options, settings.num_workers, settings.route_policy, settings.scale, settings.roles
        )

    repository = ServableRepository(
        settings.supervision, PrivateModels(models, make), lambda: [backend.name for backend in models.list()]
    )
    models.taken_by = repository.taken_by
    if settings.worker_listener is not None:
        from penstock.servables.machines.joined_machines import JoinedMachines

        primary.serve_machine = JoinedMachines(repository).serve
    return repository


def _listeners(
    models: RemoteModels,
    servables: ServableRepository | None,
    settings: ServiceSettings,
    traces: Traces | None,
    arrivals: Arrivals,
) -> tuple[dict[str, Listener | GrpcListener], Changes, Metrics]:
    """Return the public listeners and the configured admin listener, its changes of models, and the metrics.

    Reads the keys and certificates, so that a wrong one ends the service before anything runs.
    """
    from penstock.serving.http.app import make_app

    gateway, changes = make_app(models, settings.gateway, traces, arrivals, methods=servables), Changes(models)
    metrics = gateway.admission.metrics
    metrics.servables = servables
    listeners: dict[str, Listener | GrpcListener] = {"http": Listener(gateway, gateway.settings)}
    if settings.gateway.grpc_port is not None:
        from penstock.serving.grpc.listener import GrpcListener

        listeners["grpc"] = GrpcListener(gateway.admission)
    if settings.admin_socket is not None:
        from penstock.serving.http.admin import make_admin

        admin = make_admin(changes, models, metrics)
        listeners["admin"] = Listener(admin, admin.settings, settings.admin_socket)
    return listeners, changes, metrics


async def _load(models: RemoteModels, servables: ServableRepository | None, settings: ServiceSettings) -> None:
    """Load models, then servables, which may use the models.  If one fails, the others are ended first."""
    loads = [asyncio.ensure_future(models.load(path, name)) for name, path in settings.models]
    try:
        await asyncio.gather(*loads)
    finally:
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
    if servables is not None:
        for root in settings.servables:
            await servables.open(root)


async def _drain(models: RemoteModels, servables: ServableRepository | None, stop_now: asyncio.Event) -> None:
    """Wait until all requests have ended, or until a second signal arrives."""
    closing = asyncio.ensure_future(_close(models, servables))
    stop_requested = asyncio.ensure_future(stop_now.wait())
    try:
        await asyncio.wait((closing, stop_requested), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop_requested.cancel()
        closing.cancel()
        with suppress(asyncio.CancelledError):
            await closing


async def _close(models: RemoteModels, servables: ServableRepository | None) -> None:
    models.is_draining = True
    if servables is not None:  # before the models that they use
        await servables.close()
    await models.close()


async def _stop(models: RemoteModels, servables: ServableRepository | None) -> None:
    if servables is not None:
        await servables.stop()
    await models.stop()
