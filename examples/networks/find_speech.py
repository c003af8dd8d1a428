"""Find the parts of a recording in which someone speaks.

    pip install 'penstock[onnx]'
    pip install --no-deps silero-vad
    python examples/networks/find_speech.py RECORDING.wav

The network is Silero VAD (MIT), which the package silero-vad 6.2.3 carries as an ONNX file.  It reads 32 ms at a time
and keeps a state, so that it also follows sound that is still coming in.
"""

from __future__ import annotations

import argparse
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from common import Floats, open_network, package_file

import penstock

RATE, FRAME, CONTEXT = 16000, 512, 64
"""Samples in a second, in a frame, and of the frame before it, which the network sees again."""
SPEECH, SILENCE, SHORTEST, LONGEST_GAP = 0.5, 0.35, 8, 4
"""Speech begins at one probability and ends below another; the shortest part, and the longest gap inside, in frames."""


def read_wave(path: Path | str) -> Floats:
    """Return the samples of a WAV file of 16 bits from -1 to 1, in one channel and with 16,000 a second."""
    with wave.open(str(path)) as opened:
        if opened.getsampwidth() != 2:
            raise SystemExit(f"{path}: expected samples of 16 bits, got {8 * opened.getsampwidth()}")
        rate, channels = opened.getframerate(), opened.getnchannels()
        data = np.frombuffer(opened.readframes(opened.getnframes()), "<i2")
    if not len(data):
        raise SystemExit(f"{path}: expected samples, got none")
    samples = data.reshape(-1, channels).mean(1) / 32768
    if rate > RATE:  # average what lies between two of the new samples
        width = rate // RATE
        samples = np.convolve(samples, np.full(width, 1 / width), "same")
    times = np.arange(int(len(samples) * RATE / rate)) * rate / RATE
    return np.interp(times, np.arange(len(samples)), samples).astype(np.float32)


def probabilities(network: penstock.Predictor, samples: Floats) -> Iterator[float]:
    """Yield the probability of speech of each frame."""
    state = np.zeros((2, 1, 128), np.float32)
    padded = np.concatenate([np.zeros(CONTEXT, np.float32), samples, np.zeros(-len(samples) % FRAME, np.float32)])
    for start in range(0, len(padded) - CONTEXT, FRAME):
        frame = padded[None, start : start + CONTEXT + FRAME]
        probability, state = network.run({"input": frame, "state": state})
        yield float(probability[0, 0])


def parts(values: Iterator[float]) -> list[tuple[float, float]]:
    """Return the start and the end of each part with speech, in seconds."""
    found: list[list[int]] = []
    is_speech = False
    for at, value in enumerate(values):
        is_speech = value >= (SILENCE if is_speech else SPEECH)
        if is_speech and found and at - found[-1][1] <= LONGEST_GAP:
            found[-1][1] = at + 1
        elif is_speech:
            found.append([at, at + 1])
    seconds = FRAME / RATE
    return [(start * seconds, end * seconds) for start, end in found if end - start >= SHORTEST]


def main() -> None:
    parser = argparse.ArgumentParser(description="Find the parts of a recording in which someone speaks.")
    parser.add_argument("recording", metavar="RECORDING.wav")
    parser.add_argument("--network", metavar="NET", help="an ONNX file or a bundle (default: the package's)")
    args = parser.parse_args()
    file = args.network or package_file("silero_vad", "data/silero_vad.onnx")
    network = open_network(file, sr=RATE, **{"input/1": CONTEXT + FRAME})
    for start, end in parts(probabilities(network, read_wave(args.recording))):
        print(f"{start:.1f} s to {end:.1f} s")


if __name__ == "__main__":
    main()
