"""The machine's limits, from a separate process: bytes per second that can be read, operations per second.

python benchmarks/peers/probe.py [--threads 2] [--compute]
"""

from __future__ import annotations

import argparse
import json

from penstock.core import native

DTYPES = {"f32": "F32", "bf16": "BF16", "int8": "I8"}
BUFFER_BYTES = 512 << 20
PASSES = 8
TRIES = 4  # of a peak, which is the best of them: a neighbour can take a core for a while


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--compute", action="store_true", help="also the arithmetic peaks")
    args = parser.parse_args()
    context = native.Context(num_threads=args.threads)
    found = {"read": native.probe_bandwidth(context, BUFFER_BYTES, PASSES)}
    if args.compute:
        from penstock.graph.ir import DType

        for name, dtype in DTYPES.items():
            found[name] = max(native.probe_compute(context, int(DType[dtype]), 0.25) for _ in range(TRIES))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
