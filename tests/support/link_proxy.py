"""A TCP proxy that cuts, delays and throttles what it forwards, as a bad network does."""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import suppress

_CHUNK_BYTES = 1 << 14


class LinkProxy:
    """Forwards the connections at ``port`` to a port of this machine.

    ``delay_s``: of each byte, in each direction.  ``bytes_per_s``: of each direction; 0 is no limit.  ``cut`` holds
    everything back, the end of a connection too, until ``heal``: neither end gets a sign, as when a cable is pulled.
    """

    def __init__(self, target: int) -> None:
        self.delay_s, self.bytes_per_s = 0.0, 0
        self.num_bytes = 0
        self._target = target
        self._open = threading.Event()
        self._open.set()
        self._is_closed = False
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("localhost", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._is_closed = True
        self._open.set()
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("localhost", self._target))
                except OSError:  # nothing listens there now
                    near.close()
                    continue
                self._sockets += [near, far]
                if self._is_closed:  # since the connection came
                    near.close()
                    far.close()
                    return
                for source, sink in ((near, far), (far, near)):
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    pieces: queue.Queue[tuple[float, bytes]] = queue.Queue()
                    threading.Thread(target=self._read, args=(source, pieces), daemon=True).start()
                    threading.Thread(target=self._write, args=(sink, pieces), daemon=True).start()

    def _read(self, source: socket.socket, pieces: queue.Queue[tuple[float, bytes]]) -> None:
        data = b"x"
        while data:
            try:
                data = source.recv(_CHUNK_BYTES)
            except OSError:
                data = b""
            pieces.put((time.monotonic() + self.delay_s, data))

    def _write(self, sink: socket.socket, pieces: queue.Queue[tuple[float, bytes]]) -> None:
        with suppress(OSError):
            while True:
                due, data = pieces.get()
                time.sleep(max(0.0, due - time.monotonic()))
                if self.bytes_per_s:
                    time.sleep(len(data) / self.bytes_per_s)
                self._open.wait()
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)
                self.num_bytes += len(data)
