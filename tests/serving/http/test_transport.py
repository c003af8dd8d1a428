"""A connection's transport: what is written to a client that has gone."""

import asyncio
import socket

from penstock.serving.http.transport import Transport


def test_writes_to_a_closed_connection_are_not_logged(caplog) -> None:
    async def pieces(wrapped: bool) -> list[str]:
        caplog.clear()
        ours, theirs = socket.socketpair()
        inner, _ = await asyncio.get_running_loop().connect_accepted_socket(asyncio.Protocol, ours)
        transport = Transport(inner, lambda: False, 1.0, 1.0) if wrapped else inner
        theirs.close()
        for _ in range(20):  # within one turn of the loop, before the protocol is told
            transport.write(b"piece")
        inner.abort()
        await asyncio.sleep(0)
        return [record.message for record in caplog.records if record.name == "asyncio"]

    assert asyncio.run(pieces(wrapped=True)) == []
    assert len(asyncio.run(pieces(wrapped=False))) > 5, "asyncio says nothing any more: nothing is kept from the log"
