"""Read the text in a picture: one network finds the lines, another reads them.

    pip install 'penstock[onnx]' pillow
    pip install --no-deps rapidocr-onnxruntime
    python examples/networks/read_text.py PICTURE

The networks are PP-OCRv4 (Apache-2.0, English and Chinese), which the package rapidocr-onnxruntime 1.4.4 carries as
ONNX files.  Others of the PP-OCR family run, too, such as PP-OCRv6 of the package rapidocr: give their paths with
--detector and --recognizer.  Lines must be nearly horizontal.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from common import Floats, Picture, open_network, package_file, read_picture, resize
from numpy.typing import NDArray

import penstock

PACKAGE = "rapidocr_onnxruntime"
MAX_SIDE, STEP, HEIGHT, MIN_WIDTH = 960, 32, 48, 320
INK, MIN_SCORE, GROWTH = 0.3, 0.5, 1.6
"""A map point belongs to a line from INK on; a line has a mean of MIN_SCORE or more, and grows by GROWTH."""


class Box(NamedTuple):
    """A line of text in a picture: its first row and column, and those behind its last."""

    top: int
    left: int
    bottom: int
    right: int


def normalize(picture: Floats) -> Floats:
    """Return [1, 3, H, W] from -1 to 1, blue first, for a picture [H, W, 3] from 0 to 255."""
    return np.ascontiguousarray(picture[None, :, :, ::-1].transpose(0, 3, 1, 2) / 127.5 - 1, np.float32)


def find_lines(detector: penstock.Predictor, picture: Picture) -> list[Box]:
    """Return the lines of text, from top to bottom and from left to right."""
    height, width = picture.shape[:2]
    shrink = min(1.0, MAX_SIDE / max(height, width))
    rows, columns = (max(STEP, round(side * shrink / STEP) * STEP) for side in (height, width))
    (maps,) = detector.run([normalize(resize(picture, rows, columns))])
    boxes = [grown(box, height / rows, width / columns, height, width) for box in regions(maps[0, 0])]
    return in_order(boxes)


def regions(scores: Floats) -> Iterator[Box]:
    """Yield the box around each region of the map."""
    labels, count = label(scores > INK)
    for number in range(1, count + 1):
        rows, columns = np.nonzero(labels == number)
        if min(np.ptp(rows), np.ptp(columns)) >= 2 and scores[rows, columns].mean() >= MIN_SCORE:
            yield Box(int(rows.min()), int(columns.min()), int(rows.max()) + 1, int(columns.max()) + 1)


def label(mask: NDArray[np.bool_]) -> tuple[NDArray[np.int64], int]:
    """Return the number of the connected region of each point, from 1, and how many there are."""
    labels = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:  # each point takes the largest number of its row or column that it is connected with
        before = labels.copy()
        for axis in (0, 1):
            for step in (1, -1):
                labels = np.where(mask, _running_max(labels, axis, step), 0)
        if (labels == before).all():
            break
    numbers, labels = np.unique(labels, return_inverse=True)
    return labels.reshape(mask.shape) + (numbers[0] != 0), int((numbers != 0).sum())


def _running_max(labels: NDArray[np.int64], axis: int, step: int) -> NDArray[np.int64]:
    """Return the largest number so far of each run of points, along an axis in one direction."""
    lines = np.moveaxis(labels, axis, 1)[:, ::step]
    runs = np.cumsum(lines == 0, axis=1)  # a gap begins another run, so it adds more than any number
    shift = runs * (labels.size + 1)
    result = np.maximum.accumulate(lines + shift, axis=1) - shift
    return np.moveaxis(result[:, ::step], 1, axis)


def grown(box: Box, down: float, across: float, height: int, width: int) -> Box:
    """Return a box of the map in the picture, with the margin that the network leaves out."""
    tall, wide = box.bottom - box.top, box.right - box.left
    margin = GROWTH * tall * wide / (2 * (tall + wide))
    return Box(
        max(0, round((box.top - margin) * down)),
        max(0, round((box.left - margin) * across)),
        min(height, round((box.bottom + margin) * down)),
        min(width, round((box.right + margin) * across)),
    )


def in_order(boxes: list[Box]) -> list[Box]:
    """Return boxes as one reads: those that begin in the upper half of the first belong to its row."""
    left, ordered = sorted(boxes), []
    while left:
        end = (left[0].top + left[0].bottom) / 2
        row = [box for box in left if box.top < end]
        ordered += sorted(row, key=lambda box: box.left)
        left = left[len(row) :]
    return ordered


def read_line(recognizer: penstock.Predictor, characters: list[str], line: Picture) -> tuple[str, float]:
    """Return the text of a line, and the mean score of its characters."""
    width = max(1, round(line.shape[1] * HEIGHT / line.shape[0]))
    padded = np.full((HEIGHT, max(MIN_WIDTH, width), 3), 127.5, np.float32)
    padded[:, :width] = resize(line, HEIGHT, width)
    (scores,) = recognizer.run([normalize(padded)])
    return decode(scores[0], characters)


def decode(scores: Floats, characters: list[str]) -> tuple[str, float]:
    """Return the text of scores [time, character]: repeated ones count once, and the first character is a blank."""
    best = scores.argmax(1)
    is_new = (best != 0) & (best != np.concatenate([[0], best[:-1]]))
    text = "".join(characters[index] for index in best[is_new])
    return text, float(scores.max(1)[is_new].mean()) if text else 0.0


def characters_of(recognizer: penstock.Predictor) -> list[str]:
    """Return the character of each score, from the properties of the network."""
    if "character" not in recognizer.properties:
        raise SystemExit("--recognizer: expected a network with its characters in the property character")
    return ["", *recognizer.properties["character"].split("\n"), " "]


def main() -> None:
    parser = argparse.ArgumentParser(description="Read the text in a picture.")
    parser.add_argument("picture")
    parser.add_argument("--detector", metavar="NET", help="an ONNX file or a bundle (default: the package's)")
    parser.add_argument("--recognizer", metavar="NET", help="an ONNX file or a bundle (default: the package's)")
    args = parser.parse_args()
    folder = "models/ch_PP-OCRv4_"
    detector = open_network(args.detector or package_file(PACKAGE, f"{folder}det_infer.onnx"))
    recognizer = open_network(args.recognizer or package_file(PACKAGE, f"{folder}rec_infer.onnx"))
    characters, picture = characters_of(recognizer), read_picture(args.picture)
    for box in find_lines(detector, picture):
        text, score = read_line(recognizer, characters, picture[box.top : box.bottom, box.left : box.right])
        print(f"{score:.2f} {text}")


if __name__ == "__main__":
    main()
