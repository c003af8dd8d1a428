"""Compares an empty servable with LitServe, MLServer and Ray Serve, and measures the gain of batching for a network.

    python benchmarks/servables.py build/servable-peers [--seconds 3] [--turns 1] [--system Penstock ...] [--network]

Peers are installed into the folder, pinned, each in its own environment (1 GB).  One system runs at a time.  With
``--turns`` all systems run that many times, every other time in reverse order.  Each cell shows the turn with the
median rate, because machines change their speed. This process sends the load over bare sockets.  It has one of two
cores if there are two.  Client and system share the machine, so the cost of a system shows in the rate.  ``--network``
instead serves a network of about 1 ms with Penstock only, with batches of one and of up to 32.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from pathlib import Path

from servables_load import Figures, grpc_load, http_load
from servables_peers import OIP_METHOD, SYSTEMS, System, body, install, message, running

HOST = "127.0.0.1"
CONCURRENCY = (1, 8, 64, 256)
NETWORK = """
import numpy as np
from penstock import servable

network = servable.model("network.onnx", inputs={{"x": "FP32[1024]"}}, outputs={{"y": "FP32[10]"}}, batch_size={size})


@servable.stage(outputs={{"x": "FP32[1024]"}}, batch_size=64)
def widen(x):
    return np.tile(x, (1, 256))


@servable.method(inputs={{"x": "FP32[4]"}}, outputs={{"y": "FP32[10]"}})
def predict(x):
    return network(widen(x))
"""


def free_ports() -> tuple[int, int]:
    with socket.create_server((HOST, 0)) as one, socket.create_server((HOST, 0)) as two:
        return one.getsockname()[1], two.getsockname()[1]


def measure(system: System, folder: Path, peers: Path, seconds: float) -> dict[tuple[str, int], Figures]:
    """Return the figures by protocol and number of requests in flight."""
    found = {}
    ports = free_ports()
    with running(system, folder, peers, ports):
        for protocol in ("REST", "gRPC") if system.has_grpc else ("REST",):
            for concurrency in CONCURRENCY:
                if protocol == "REST":
                    figures = http_load(HOST, ports[0], system.path, body(), concurrency, seconds)
                else:
                    figures = grpc_load(HOST, ports[1], OIP_METHOD, message(), concurrency, seconds)
                found[protocol, concurrency] = figures
                print(f"{system.name:<10} {protocol} {concurrency:>3}  {figures}", flush=True)
    return found


def write_network(path: Path) -> None:
    """Write a random network: two layers of 1024 x 1024 and one of 10."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)
    nodes, weights, name = [], [], "x"
    for number, (rows, columns) in enumerate(((1024, 1024), (1024, 1024), (1024, 10))):
        weights.append(
            numpy_helper.from_array(random.normal(0, 0.03, (rows, columns)).astype(np.float32), f"w{number}")
        )
        last = "y" if columns == 10 else f"h{number}"
        nodes.append(helper.make_node("MatMul", [name, f"w{number}"], [last]))
        name = last
        if last != "y":
            nodes.append(helper.make_node("Relu", [last], [f"r{number}"]))
            name = f"r{number}"
    values = [
        helper.make_tensor_value_info(one, TensorProto.FLOAT, ["n", size]) for one, size in (("x", 1024), ("y", 10))
    ]
    graph = helper.make_graph(nodes, "network", [values[0]], [values[1]], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def network(size: int) -> System:
    """Return Penstock with the network, in batches of up to ``size``."""

    def write(folder: Path, peers: Path, port: int, grpc_port: int) -> tuple[list[str], dict[str, str]]:
        place = folder / "servables" / "noop"
        (place / "1").mkdir(parents=True)
        write_network(place / "1" / "network.onnx")
        (place / "servable.py").write_text(NETWORK.format(size=size))
        command = [sys.executable, "-m", "penstock", "serve", str(folder / "servables"), "--log", "warning"]
        return [*command, "--port", str(port), "--grpc-port", str(grpc_port)], {}

    return System(f"batch {size}", "/v2/models/noop/infer", write)


def medians(turns: list[dict[tuple[str, int], Figures]]) -> dict[tuple[str, int], Figures]:
    """Return for each cell the turn with the median rate."""
    return {cell: sorted((one[cell] for one in turns), key=lambda one: one.rate)[len(turns) // 2] for cell in turns[0]}


def table(found: dict[str, dict[tuple[str, int], Figures]]) -> str:
    """Return the figures as a Markdown table."""
    lines = ["| | in flight | " + " | ".join(found) + " |", "|---|---|" + "---|" * len(found)]
    for protocol in ("REST", "gRPC"):
        for concurrency in CONCURRENCY:
            cells = []
            for figures in found.values():
                one = figures.get((protocol, concurrency))
                told = "" if one is None else f"{one.rate:,.0f}/s, {one.p50 * 1e3:.1f}, {one.p99 * 1e3:.1f}"
                cells.append(told + (f", {one.num_errors} errors" if one and one.num_errors else ""))
            lines.append(f"| {protocol} | {concurrency} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", type=Path, metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured seconds per cell (default: 3)")
    parser.add_argument("--turns", type=int, default=1, help="number of repetitions (default: 1)")
    parser.add_argument(
        "--system",
        action="append",
        choices=[one.name for one in SYSTEMS],
        help="system to measure; may be repeated (default: all)",
    )
    parser.add_argument(
        "--network", action="store_true", help="measure the gain of batching for a network (default: compare systems)"
    )
    args = parser.parse_args()
    systems = [one for one in SYSTEMS if not args.system or one.name in args.system]
    if args.network:
        systems = [network(1), network(32)]
    else:
        install(args.peers)
    peers = args.peers.absolute()
    print(f"{len(os.sched_getaffinity(0))} cores; requests a second, p50 and p99 in ms")
    turns: dict[str, list[dict[tuple[str, int], Figures]]] = {one.name: [] for one in systems}
    with tempfile.TemporaryDirectory(prefix="penstock-") as place:
        for turn in range(args.turns):
            for number, system in enumerate(systems if turn % 2 == 0 else reversed(systems)):
                turns[system.name].append(measure(system, Path(place) / f"{turn}-{number}", peers, args.seconds))
            print(table({name: medians(ones) for name, ones in turns.items()}), flush=True)


if __name__ == "__main__":
    main()
