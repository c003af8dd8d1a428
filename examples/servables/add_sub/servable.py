"""Compute x1 + x2 - x3 in two stages."""

from penstock import servable


@servable.stage(outputs={"sum": "FP32[2,2]"}, batch_size=16)
def add(x1, x2):
    """Takes a batch at a time: [n, 2, 2]."""
    return x1 + x2


@servable.stage(outputs={"difference": "FP32[2,2]"})
def subtract(y1, y2):
    """Takes one instance at a time: [2, 2]."""
    return y1 - y2


@servable.method(inputs=dict.fromkeys(("x1", "x2", "x3"), "FP32[2,2]"), outputs={"y": "FP32[2,2]"})
def add_sub(x1, x2, x3):
    return subtract(add(x1, x2), x3)
