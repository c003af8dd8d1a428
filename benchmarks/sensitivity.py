"""Measures what each group of matrices loses: perplexity with its weights rounded to a scheme, all others as they are.

    python benchmarks/sensitivity.py [--scheme w4a16] [--windows 12] [--svg sensitivity.svg]

Only the weights are rounded; inputs and all arithmetic stay float32.  Prints a table, and draws it with --svg.
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import penstock
from penstock import RoundToNearest, RoundToNearestConfig, lite, load_network
from penstock.bench.charts.sensitivity_chart import HEAD, draw_sensitivity
from penstock.text.tokenizer import Tokenizer

KINDS = {
    "q|k|v": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate|up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
Losses = dict[str, dict[str, float]]
"""Change of perplexity in %, by layer ("0", "1", ... or HEAD) and kind."""


def group_of(name: str) -> tuple[str, str] | None:
    """Return layer and kind of a weight; None for one that no scheme rounds."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    kind = next((kind for kind, parts in KINDS.items() if any(f".{part}." in name for part in parts)), None)
    if layer and kind:
        return layer[1], kind
    return (HEAD, HEAD) if "lm_head" in name or "embed_tokens" in name else None


def weights_of(folder: Path, scheme: str = "") -> dict[str, np.ndarray]:
    """Return the weights of linear layers in float32, rounded to the grid of a scheme if one is given.

    A head that is tied to the embedding has the name of the embedding, as in a bundle.
    """
    network = load_network(folder)
    if scheme:
        RoundToNearest(RoundToNearestConfig(scheme)).apply(network)
    named = dict(network.named_parameters(remove_duplicate=False))
    heads = {id(tensor) for name, tensor in named.items() if "lm_head" in name}
    embeddings = {id(tensor) for name, tensor in named.items() if "embed_tokens" in name}
    return {
        name: tensor.detach().float().numpy()
        for name, tensor in named.items()
        if group_of(name) and (id(tensor) in heads if "embed_tokens" in name else id(tensor) not in embeddings)
    }


def perplexity(model: lite.Model, windows: Sequence[Sequence[int]]) -> float:
    total, count = 0.0, 0
    for ids in windows:
        arrays = (np.array([ids[:-1]], np.int32), np.array([len(ids) - 1], np.int32), np.array([1], np.int32))
        (output,) = model.predict([lite.Tensor(array) for array in arrays])
        logits = output.get_data_to_numpy()[0].astype(np.float64)
        top = logits.max(axis=1, keepdims=True)
        sums = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
        total += float((sums - logits[np.arange(len(logits)), ids[1:]]).sum())
        count += len(logits)
    return math.exp(total / count)


def measure(folder: Path, text: Path, scheme: str, window: int, num_windows: int) -> tuple[float, Losses]:
    """Return the perplexity under f32, and what each group loses."""
    tokenizer = Tokenizer({path.name: path.read_bytes() for path in folder.glob("tokenizer*.json")})
    ids = tokenizer.encode(text.read_text("utf-8"))
    tokenizer.close()
    windows = [ids[start : start + window + 1] for start in range(0, len(ids) - window, window)][:num_windows]
    original, rounded = weights_of(folder), weights_of(folder, scheme)
    losses: Losses = {}
    with tempfile.TemporaryDirectory() as temporary:
        bundle = Path(temporary) / "f32.psm"
        penstock.export(folder, bundle, scheme="f32")
        model = lite.Model()
        model.build_from_file(
            bundle, lite.ModelType.PENSTOCK, None, {"logits": "all", "seq_len": window, "kv_cache": "f32"}
        )
        base = perplexity(model, windows)
        for group in sorted({one for name in original if (one := group_of(name))}, key=_order):
            names = [name for name in original if group_of(name) == group]
            model.update_weights([lite.Tensor(rounded[name], name=name) for name in names])
            losses.setdefault(group[0], {})[group[1]] = 100 * (perplexity(model, windows) / base - 1)
            model.update_weights([lite.Tensor(original[name], name=name) for name in names])
    return base, losses


def _order(group: tuple[str, str]) -> tuple[int, int]:
    layer, kind = group
    return (int(layer), list(KINDS).index(kind)) if layer != HEAD else (1 << 30, 0)


def table(losses: Mapping[str, Mapping[str, float]]) -> str:
    """Return the losses as a table in Markdown."""
    lines = [f"| layer | {' | '.join(KINDS)} |", "|---" * (len(KINDS) + 1) + "|"]
    lines += [
        f"| {layer} | " + " | ".join(f"{of[kind]:+.3f} %" if kind in of else "" for kind in KINDS) + " |"
        for layer, of in losses.items()
        if layer != HEAD
    ]
    if HEAD in losses:
        lines.append(f"\nOutput head: {losses[HEAD][HEAD]:+.3f} %")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Loss of each layer under a scheme.")
    parser.add_argument("--model", type=Path, default=Path("demo/model"))
    parser.add_argument("--text", type=Path, default=Path("demo/model/valid.txt"))
    parser.add_argument("--scheme", default="w4a16")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=12, help="number of windows, from the beginning (default: 12)")
    parser.add_argument("--svg", type=Path, help="draw the table")
    args = parser.parse_args()
    base, losses = measure(args.model, args.text, args.scheme, args.window, args.windows)
    print(f"f32: {base:.3f}\n\n{table(losses)}")
    total = sum(value for of in losses.values() for value in of.values())
    print(f"\nSum of all groups: {total:+.3f} %")
    if args.svg:
        about = f"{args.model}, perplexity {base:.2f} under f32; one group at a time rounded to {args.scheme}"
        title, unit = "What rounding each group of matrices costs", "change of perplexity, %"
        args.svg.write_text(draw_sensitivity(losses, title, about, unit))


if __name__ == "__main__":
    main()
