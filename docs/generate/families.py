"""The table of families: what each is checked against, and its largest error, from a file that a command measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.checkpoint.gguf.architectures.table import architecture_of
from penstock.models.families import family_modules

RESULTS = Path(__file__).with_name("families.json")

_HEAD = """# Families

Values of `model_type` that run, with the figures of `python -m tests.support.family_results`: tiny networks with random
weights and odd sizes, in float32, whose logits at every position are compared with the reference. The reference is
transformers, or, for a family without a class there, a plain PyTorch network written from its published formulas. The
error is the largest difference over the largest logit.

The tests run every network of the table: the error is below 1e-4 with kernels and with the references of ops, the graph
gives the same bits as eager mode, and a prompt in chunks the same bits as a whole one.
[Getting a model](../guides/models.md) says what each family does not support. The column GGUF has the values of
`general.architecture` of the [GGUF files](../guides/models.md#gguf-files) that run.

| model_type | also | GGUF | reference | networks | largest error |
|---|---|---|---|---|---|
"""


def results() -> dict[str, dict[str, Any]]:
    """Return the measured families by model_type."""
    measured: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())
    return measured


def pages() -> dict[str, str]:
    """Return the page."""
    modules, measured = family_modules(), results()
    rows = []
    for name, row in measured.items():
        others = [f"`{other}`" for other, module in modules.items() if module == modules[name] and other != name]
        found = architecture_of(name)
        file = "" if found is None else f"`{found[0]}`"
        cells = [f"`{name}`", ", ".join(others), file, row["reference"], row["networks"], f"{row['error']:.1e}"]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    shown = {modules[name] for name in measured}
    rest = ", ".join(f"`{name}`" for name, module in sorted(modules.items()) if module not in shown)
    end = f"\n\nTests of their own compare encoders, prefix networks and the text of models with images: {rest}.\n"
    return {"reference/families.md": _HEAD + "\n".join(rows) + end}
