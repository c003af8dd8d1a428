"""llama.cpp's side of llama_quantize.py, in a Python that has llama-cpp-python.

python llama_quantize_side.py quantize FLOATS.gguf OUT.gguf IMATRIX.npz
python llama_quantize_side.py logits FILE.gguf IDS.json OUT.npy
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

import llama_cpp
import numpy as np

Q4_K_S = 14  # LLAMA_FTYPE_MOSTLY_Q4_K_S


def quantize(source: str, out: str, importance: str) -> None:
    """Write Q4_K_S with the means of an importance matrix."""
    means = {name: np.ascontiguousarray(values, np.float32) for name, values in np.load(importance).items()}
    entries = (llama_cpp.llama_model_imatrix_data * (len(means) + 1))()  # a last entry without a name ends the list
    pointer = type(entries[0].data)
    for entry, (name, values) in zip(entries, means.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = ctypes.cast(values.ctypes.data, pointer)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = Q4_K_S, len(os.sched_getaffinity(0))
    params.imatrix = ctypes.cast(entries, type(params.imatrix))
    if status := llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(params)):
        raise SystemExit(f"llama_model_quantize: {status}")


def logits(file: str, ids: str, out: str) -> None:
    """Write the logits [windows, tokens, vocab] of windows of token ids."""
    with open(ids, encoding="utf-8") as stream:
        windows = json.load(stream)
    length = len(windows[0])
    llama = llama_cpp.Llama(file, n_ctx=length, n_batch=length, logits_all=True, verbose=False)
    rows = []
    for window in windows:
        llama.reset()
        llama.eval(window)
        rows.append(np.array(llama.scores[: len(window)], np.float32))
    np.save(out, np.stack(rows))


if __name__ == "__main__":
    {"quantize": quantize, "logits": logits}[sys.argv[1]](*sys.argv[2:])
