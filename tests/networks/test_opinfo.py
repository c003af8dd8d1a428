"""PyTorch's own samples of its operations (OpInfo) give what PyTorch computes, or are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

CHECK = Path(__file__).with_name("opinfo_check.py")
SAMPLE = ("floor", "var_mean", "nn.functional.relu", "native_layer_norm", "nn.functional.pixel_unshuffle", "copysign")
PARTS = "a part into which PyTorch splits other operations, whose samples reach it"
RESIZED = "nn.functional.interpolate has samples for each mode"
PADDED = "nn.functional.pad has samples for each mode"
RECURRENT = "PyTorch tests it as a module; here tests of recurrent networks do"
TYPES = "the samples of to, half and similar operations reach it"
WITHOUT_OPERATION = {
    **dict.fromkeys(("__and__", "__or__", "__xor__"), "the operators of bitwise_and, bitwise_or and bitwise_xor"),
    **dict.fromkeys(("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_cdist_forward", "_log_softmax"), PARTS),
    **dict.fromkeys(("_native_batch_norm_legit_no_training", "_prelu_kernel", "_softmax", "_unsafe_index"), PARTS),
    **dict.fromkeys(("_unsafe_index_put", "_unsafe_view", "_weight_norm", "alias", "convolution", "copy"), PARTS),
    **dict.fromkeys(("detach", "feature_dropout", "lift_fresh_copy", "numpy_T", "zero"), PARTS),
    **dict.fromkeys(("max_pool1d_with_indices", "max_pool2d_with_indices"), PARTS),
    **dict.fromkeys(("_to_copy", "convert_element_type", "type_as"), TYPES),
    **dict.fromkeys(("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "upsample_bicubic2d"), RESIZED),
    **dict.fromkeys(("upsample_bilinear2d", "upsample_linear1d"), RESIZED),
    **dict.fromkeys(("upsample_nearest1d", "upsample_nearest2d"), RESIZED),
    **dict.fromkeys([f"{kind}_pad{axes}d" for kind in ("reflection", "replication") for axes in (1, 2, 3)], PADDED),
    **dict.fromkeys(("gru", "gru_cell", "lstm", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"), RECURRENT),
    "cudnn_batch_norm": "an op of GPUs, which reads as batch_norm",
    "index": "__getitem__ has its samples",
    "nms": "an op of torchvision, which test_selected_boxes.py tests",
}
"""The readers whose name no operation of PyTorch's table has, and why."""


def run_check(*args: str) -> list[Any]:
    """Return the lines of JSON that the check prints."""
    command = [sys.executable, str(CHECK), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.long
def test_a_few_samples_are_equal_or_refused() -> None:
    missing, *outcomes = run_check("1", *SAMPLE)
    assert missing == sorted(WITHOUT_OPERATION)
    assert [item for item in outcomes if item[2] not in ("equal", "refused")] == []
    assert Counter(item[2] for item in outcomes)["equal"] >= 6


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_samples_of_all_readers_are_equal_or_refused() -> None:
    missing, *outcomes = run_check("2")
    assert missing == sorted(WITHOUT_OPERATION)
    assert [item for item in outcomes if item[2] not in ("equal", "refused", "skipped")] == []
    assert len({item[0] for item in outcomes if item[2] == "equal"}) >= 200
