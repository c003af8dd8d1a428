"""The primary's part in the transfer of pages: it passes them from one worker to another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from penstock.cluster.roles import MIN_PAGES
from penstock.runtime.program import PAGE_TOKENS
from penstock.serving.proto import wire_pb2 as pb

if TYPE_CHECKING:
    from penstock.serving.workers.worker_connection import WorkerConnection

__all__ = ["MIN_PAGES", "copy_pages"]

_WINDOW: Final = 4
"""The most parts on their way."""
_ANSWER_S: Final = 5.0
"""Limit on the time for each answer of a worker."""
_transfers = count(1)


class _BrokenTransferError(Exception):
    """A worker is lost, slow, or has not the pages; the receiver computes what is missing."""


async def copy_pages(
    source: WorkerConnection, target: WorkerConnection, token_ids: Sequence[int], salt: str, target_salt: str
) -> int:
    """Copy what ``source`` has computed of a text to ``target``, and return how many parts of pages went.

    Whatever happens, the text is computed right: pages are used after their count and checksum only, and missing ones
    are computed.  The workers have equal state ids.  ``salt``, ``target_salt``: of the
    requests with that text in the two workers.
    """
    if len(token_ids) < MIN_PAGES * PAGE_TOKENS:
        return 0
    transfer = next(_transfers)
    sending, receiving = _End(source, transfer), _End(target, transfer)
    try:
        return await _copy(sending, receiving, list(token_ids), salt, target_salt)
    except _BrokenTransferError:
        receiving.end()
        return 0
    finally:
        sending.end()
        sending.close()
        receiving.close()


async def _copy(sending: _End, receiving: _End, token_ids: list[int], salt: str, target_salt: str) -> int:
    transfer = sending.transfer
    offer = pb.OfferPages(transfer=transfer, token_ids=token_ids, cache_salt=salt)
    num_pages = (await sending.ask(pb.ToWorker(offer_pages=offer), "pages_offered")).num_pages
    if num_pages < MIN_PAGES:
        return 0
    grant = pb.GrantPages(transfer=transfer, token_ids=token_ids[: num_pages * PAGE_TOKENS], cache_salt=target_salt)
    granted = await receiving.ask(pb.ToWorker(grant_pages=grant), "pages_granted")
    num_asked = 0
    for part in range(granted.num_parts):
        while num_asked < min(granted.num_parts, part + _WINDOW):
            sending.send(pb.ToWorker(read_page=pb.ReadPage(transfer=transfer, first=granted.first, part=num_asked)))
            num_asked += 1
        data = await sending.answer("page_data")
        await receiving.ask(pb.ToWorker(page_data=data), "page_stored")
    if not granted.num_parts:
        return 0
    ended = await sending.ask(pb.ToWorker(end_pages=pb.EndPages(transfer=transfer)), "pages_ended")
    end = pb.EndPages(transfer=transfer, num_parts=ended.num_parts, checksum=ended.checksum)
    return int((await receiving.ask(pb.ToWorker(end_pages=end), "pages_ended")).num_parts)


class _End:
    """One of the two workers of a transfer."""

    def __init__(self, connection: WorkerConnection, transfer: int) -> None:
        self.transfer = transfer
        self._connection = connection
        self._answers: asyncio.Queue[pb.FromWorker | None] = asyncio.Queue()
        connection.transfers[transfer] = self._answers.put_nowait

    def close(self) -> None:
        self._connection.transfers.pop(self.transfer, None)

    def end(self) -> None:
        """Let the worker release its pages."""
        self.send(pb.ToWorker(end_pages=pb.EndPages(transfer=self.transfer)))

    def send(self, message: pb.ToWorker) -> None:
        self._connection.send_page_message(message)

    async def ask(self, message: pb.ToWorker, kind: str) -> Any:
        """Send a message and return the answer, which has this kind."""
        self.send(message)
        return await self.answer(kind)

    async def answer(self, kind: str) -> Any:
        """Return the next answer, which has this kind."""
        if self._connection.gone.is_set():
            raise _BrokenTransferError
        try:
            message = await asyncio.wait_for(self._answers.get(), _ANSWER_S)
        except TimeoutError:
            raise _BrokenTransferError from None
        if message is None or message.WhichOneof("kind") != kind:
            raise _BrokenTransferError
        return getattr(message, kind)
