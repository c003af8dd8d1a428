"""One network over two processes: each opens its part, gets the same input, and prints the same output.

penstock export demo/model ranks --tp 2
penstock launch --nproc 2 -- python examples/distributed/main.py --model_path "ranks/rank_{rank}.psm"
mpirun -n 2 python examples/distributed/main.py --model_path "ranks/rank_{rank}.psm"
"""

from __future__ import annotations

import argparse

import numpy as np

from penstock import lite


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_path", default="ranks/rank_{rank}.psm", help="{rank} becomes the rank of the process")
    parser.add_argument("--rank_id", type=int, help="default: as the launcher says")
    parser.add_argument("--device_id", type=int, default=-1, help="a share of this host's cores; default: any core")
    parser.add_argument("--config_file", default="")
    args = parser.parse_args()

    # init context
    context = lite.Context()
    context.target = ["cpu"]
    context.cpu.device_id = args.device_id
    if args.rank_id is not None:
        context.cpu.rank_id = args.rank_id

    # create Model and build Model
    model = lite.Model()
    path = args.model_path.format(rank=context.cpu.rank_id)
    model.build_from_file(path, lite.ModelType.PENSTOCK, context, args.config_file)

    # set model input as ones
    inputs = model.get_inputs()
    for tensor in inputs:
        tensor.set_data_from_numpy(np.ones(tensor.shape, np.int32))

    # execute inference
    outputs = model.predict(inputs)

    # get output and print
    for output in outputs:
        print(
            f"tensor's name is:{output.name.rstrip()} data size is:{output.data_size} "
            f"tensor elements num is:{output.element_num}"
        )
        data = output.get_data_to_numpy().flatten()
        print(f"output data is: {' '.join(map(str, data[:10]))}")  # one string, since ranks may share one output
    model.close()


if __name__ == "__main__":
    main()
