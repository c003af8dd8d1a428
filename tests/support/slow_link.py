"""A bridge between two network interfaces that delays and throttles the packets between them.

``python slow_link.py FIRST SECOND DELAY_S BYTES_PER_S`` runs in the network namespace of both interfaces until it is
killed.  It reads and writes packet sockets with their virtio header, so that the kernel computes the checksums that it
left to the other end of a veth pair (packet(7), PACKET_VNET_HDR).
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time

_ETH_P_ALL = 3
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_MOST_BYTES = 1 << 17


def open_interface(name: str) -> socket.socket:
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    found.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    found.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    found.bind((name, _ETH_P_ALL))
    return found


def forward(source: socket.socket, sink: socket.socket, delay_s: float, bytes_per_s: float) -> None:
    packets: queue.Queue[tuple[float, bytes]] = queue.Queue()

    def write() -> None:
        while True:
            due, packet = packets.get()
            time.sleep(max(0.0, due - time.monotonic()))
            if bytes_per_s:
                time.sleep(len(packet) / bytes_per_s)
            sink.send(packet)

    threading.Thread(target=write, daemon=True).start()
    while True:
        packet = source.recv(_MOST_BYTES)
        packets.put((time.monotonic() + delay_s, packet))


def main() -> None:
    first, second = (open_interface(name) for name in sys.argv[1:3])
    delay_s, bytes_per_s = map(float, sys.argv[3:5])
    threading.Thread(target=forward, args=(second, first, delay_s, bytes_per_s), daemon=True).start()
    print("ready", flush=True)
    forward(first, second, delay_s, bytes_per_s)


if __name__ == "__main__":
    main()
