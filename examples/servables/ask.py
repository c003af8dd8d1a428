"""Send requests to the servables of this folder.

penstock serve demo/demo.psm examples/servables
python examples/servables/ask.py
"""

from __future__ import annotations

import argparse

import numpy as np

from penstock import Client

SEVEN = [
    [0, 0, 7, 8, 13, 16, 15, 1], [0, 0, 7, 7, 4, 11, 12, 0], [0, 0, 0, 0, 8, 13, 1, 0], [0, 4, 8, 8, 15, 15, 6, 0],
    [0, 2, 11, 15, 15, 4, 0, 0], [0, 0, 0, 16, 5, 0, 0, 0], [0, 0, 9, 15, 1, 0, 0, 0], [0, 0, 13, 5, 0, 0, 0, 0],
]  # fmt: skip
"""A handwritten seven."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="http://..., or grpc://...")
    with Client(parser.parse_args().url) as client:
        image = np.array(SEVEN, np.float32).reshape(1, 64)
        print("digits.classify_top1:", client.infer("digits", {"image": image})["label"][0])
        found = client.infer("digits", {"image": image}, method="classify_top3")
        pairs = zip(found["labels"][0], found["scores"][0], strict=True)
        print("digits.classify_top3:", ", ".join(f"{label} ({score:.0%})" for label, score in pairs))

        one = np.ones((1, 2, 2), np.float32)
        print("add_sub:", client.infer("add_sub", {"x1": 5 * one, "x2": 2 * one, "x3": 3 * one})["y"][0].tolist())

        random = np.random.default_rng(0)
        blurred = (np.clip(image + random.normal(0, 6, image.shape), 0, 16).astype(np.float32) for _ in range(100))
        answers = client.infer_many("digits", ({"image": one} for one in blurred))
        print("100 blurred pictures, 32 requests in flight:", [one["label"][0] for one in answers].count(7), "sevens")

        if "demo" in (model["name"] for model in client.servables.statistics()):
            found = client.infer("complete", {"code": ["def add(a, b):"]})
            print(f"complete: {found['num_lines'][0]} lines\n{found['code'][0].decode()}")


if __name__ == "__main__":
    main()
