"""The demo's folder, and strategies for cutting folders."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from penstock.core.rank_layout import RankLayout
from penstock.graph.strategy import CapturedModel, capture_model, make_strategy
from penstock.sharding.source import open_whole
from penstock.sharding.strategy import Strategy

DEMO = Path(__file__).parents[2] / "demo" / "model"


@cache
def _captured(folder: Path, config: bytes) -> CapturedModel:
    return capture_model(open_whole(folder))


def strategy_of(folder: Path, layout: RankLayout | int) -> Strategy:
    return make_strategy(_captured(folder, (folder / "config.json").read_bytes()), layout)
