"""A worker's part in the transfer of pages: it sends those of its engine, or receives pages for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from penstock.engine.page_copies import HeldPages, grant_pages, hold_pages
from penstock.logs import note
from penstock.serving.proto import wire_pb2 as pb

if TYPE_CHECKING:
    from penstock.llm.engine_thread import EngineThread

__all__ = ["LEASE_S", "PAGE_KINDS", "WorkerPages"]

LEASE_S: Final = 5.0
"""Pages are released when no message of their transfer has come for so long."""
PAGE_KINDS: Final = ("offer_pages", "grant_pages", "read_page", "page_data", "end_pages")
"""The kinds of the messages that ``handle`` takes."""


class WorkerPages:
    """The transfers of a worker.  ``send`` sends a message to the primary from any thread.

    Everything happens in the engine's thread between two steps, in the order of the messages.
    """

    def __init__(self, thread: EngineThread, send: Callable[[pb.FromWorker], object]) -> None:
        self._thread, self._send = thread, send
        self._held: dict[int, HeldPages] = {}
        self._leases: dict[int, asyncio.TimerHandle] = {}

    def handle(self, message: pb.ToWorker) -> None:
        """Handle a message of one of ``PAGE_KINDS``, in the event loop."""
        kind = message.WhichOneof("kind") or ""
        transfer = getattr(message, kind).transfer
        lease = self._leases.pop(transfer, None)
        if lease is not None:
            lease.cancel()
        loop = asyncio.get_running_loop()
        self._leases[transfer] = loop.call_later(LEASE_S, self._expire, transfer)
        self._thread.call(lambda: self._handle_in_step(kind, message))

    def _expire(self, transfer: int) -> None:
        self._leases.pop(transfer, None)
        self._thread.call(lambda: self._release(transfer))

    def _release(self, transfer: int) -> None:
        held = self._held.pop(transfer, None)
        if held is not None:
            held.release()

    def close(self) -> None:
        """End all leases now."""
        for transfer, lease in [*self._leases.items()]:
            lease.cancel()
            self._expire(transfer)

    def _handle_in_step(self, kind: str, message: pb.ToWorker) -> None:
        try:
            self._answer(kind, message)
        except Exception as error:  # the engine's thread must go on; the receiver computes the pages
            note("penstock worker", f"a transfer of pages failed: {error!r}", logging.ERROR)
            transfer = getattr(message, kind).transfer
            self._release(transfer)
            self._send(pb.FromWorker(pages_ended=pb.PagesEnded(transfer=transfer)))

    def _answer(self, kind: str, message: pb.ToWorker) -> None:
        if kind == "offer_pages":
            self._offer(message.offer_pages)
        elif kind == "grant_pages":
            self._grant(message.grant_pages)
        elif kind == "read_page":
            self._read(message.read_page)
        elif kind == "page_data":
            self._store(message.page_data)
        else:
            self._end(message.end_pages)

    def _offer(self, offer: pb.OfferPages) -> None:
        self._release(offer.transfer)
        held = hold_pages(self._thread.llm.engine, list(offer.token_ids), offer.cache_salt)
        if held is not None:
            self._held[offer.transfer] = held
        num_pages = 0 if held is None else held.num_pages
        self._send(pb.FromWorker(pages_offered=pb.PagesOffered(transfer=offer.transfer, num_pages=num_pages)))

    def _grant(self, grant: pb.GrantPages) -> None:
        self._release(grant.transfer)
        granted = pb.PagesGranted(transfer=grant.transfer)
        held = grant_pages(self._thread.llm.engine, list(grant.token_ids), grant.cache_salt)
        if held is not None:
            self._held[grant.transfer] = held
            granted.first, granted.num_parts = held.first, held.num_parts
        self._send(pb.FromWorker(pages_granted=granted))

    def _read(self, wanted: pb.ReadPage) -> None:
        held, data = self._held.get(wanted.transfer), None
        if held is not None:
            if not held.num_done:
                held.begin_at(wanted.first)
            data = held.read() if held.num_done == wanted.part else None
        if data is None:
            self._end(pb.EndPages(transfer=wanted.transfer))
            return
        part = pb.PageData(transfer=wanted.transfer, part=wanted.part, data=data)
        self._send(pb.FromWorker(page_data=part))

    def _store(self, part: pb.PageData) -> None:
        held = self._held.get(part.transfer)
        if held is None or held.num_done != part.part or not held.write(part.data):
            self._end(pb.EndPages(transfer=part.transfer))
            return
        self._send(pb.FromWorker(page_stored=pb.PageStored(transfer=part.transfer, part=part.part)))

    def _end(self, end: pb.EndPages) -> None:
        """End a transfer.  The sender tells count and checksum; the receiver uses the pages if they are the same.

        A receiver goes on holding them until its lease ends, so that the request finds them.
        """
        ended = pb.PagesEnded(transfer=end.transfer)
        held = self._held.get(end.transfer)
        if held is not None and not end.checksum:
            if held.is_known:
                ended.num_parts, ended.checksum = held.num_done, held.checksum
            self._release(end.transfer)
        elif held is not None and held.use(end.num_parts, end.checksum):
            ended.num_parts = held.num_done
        elif held is not None:
            self._release(end.transfer)
        self._send(pb.FromWorker(pages_ended=ended))
