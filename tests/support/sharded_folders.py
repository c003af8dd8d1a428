"""The demo's folder, and strategies for cutting folders."""

from __future__ import annotations

from pathlib import Path

from penstock.graph.strategy import make_strategy
from penstock.sharding.source import open_whole
from penstock.sharding.strategy import Strategy

DEMO = Path(__file__).parents[2] / "demo" / "model"


def strategy_of(folder: Path, world: int) -> Strategy:
    return make_strategy(open_whole(folder), world)
