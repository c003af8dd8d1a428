"""Small checkpoints written byte by byte, so that tests can write what no library would."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": [1, 2],
}


def safetensors(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if not isinstance(header, bytes):
        text += b" " * (-len(text) % 8)  # as the library pads, so that tensors are aligned
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def sound_tensors() -> bytes:
    rng = np.random.default_rng(0)
    first = rng.standard_normal((4, 6), np.float32)
    second = rng.integers(0, 60000, (3, 5), np.uint16)
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]},
        "b.weight": {"dtype": "BF16", "shape": [3, 5], "data_offsets": [96, 126]},
        "c.scalar": {"dtype": "F16", "shape": [], "data_offsets": [126, 128]},
        "d.empty": {"dtype": "F32", "shape": [0, 7], "data_offsets": [128, 128]},
    }
    return safetensors(header, first.tobytes() + second.tobytes() + b"\0\x3c")


def write_folder(folder: Path, tensors: bytes | None = None, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "model.safetensors").write_bytes(sound_tensors() if tensors is None else tensors)
    return folder
