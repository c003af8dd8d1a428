"""A strategy whose ranks would lack what they compute with is refused before anything is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.core.rank_layout import RankLayout
from penstock.errors import InvalidArgumentError
from penstock.graph.strategy import check_parts
from tests.support.errors import raises
from tests.support.sharded_folders import DEMO, strategy_of

O_PROJ = "model.layers.0.self_attn.o_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize("layout", [RankLayout(2), RankLayout(2, 2)], ids=str)
def test_what_a_plan_writes_is_accepted(layout: RankLayout) -> None:
    strategy = strategy_of(DEMO, layout)
    check_parts(strategy, strategy)


def test_a_rank_may_have_more_rows_of_a_tensor_that_is_mapped() -> None:
    strategy = strategy_of(DEMO, RankLayout(2))
    whole = replace(strategy.parameters[O_PROJ], cut="replicated", ranges=())
    more = replace(strategy, parameters={**strategy.parameters, O_PROJ: whole})
    check_parts(more, strategy, {O_PROJ})
    with raises(InvalidArgumentError, param="strategy", match="cut: expected"):
        check_parts(more, strategy)


@pytest.mark.parametrize(
    ("name", "change", "field"),
    [
        (O_PROJ, {"cut": "columns"}, "cut"),
        (O_PROJ, {"cut": "owner", "rank": 1}, "cut"),
        (O_PROJ, {"ranges": ()}, "ranges"),
        (O_PROJ, {"stages": (1,)}, "stages"),
        (NORM, {"cut": "rows", "ranges": ()}, "cut"),
    ],
)
def test_parts_that_cannot_run_are_named(name: str, change: dict[str, Any], field: str) -> None:
    strategy = strategy_of(DEMO, RankLayout(2, 2))
    own = strategy.parameters[name]
    half = own.size // 2
    if change.get("cut") == "columns":
        change = {**change, "ranges": (((0, own.shape[1] // 2),), ((own.shape[1] // 2, own.shape[1]),))}
    elif "ranges" in change:  # the other rank's half
        change = {**change, "ranges": (((half, own.size),), ((0, half),))}
    wrong = replace(strategy, parameters={**strategy.parameters, name: replace(own, **change)})
    with raises(InvalidArgumentError, param="strategy", match=rf"{name}.*: {field}: expected"):
        check_parts(wrong, strategy)


def test_shard_refuses_them(penstock_inline: Any, tmp_path: Path) -> None:
    strategy = strategy_of(DEMO, 2)
    own = strategy.parameters[O_PROJ]
    columns = (((0, own.shape[1] // 2),), ((own.shape[1] // 2, own.shape[1]),))
    wrong = replace(strategy, parameters={**strategy.parameters, O_PROJ: replace(own, cut="columns", ranges=columns)})
    wrong.write(tmp_path / "strategy.json")
    done = penstock_inline("shard", DEMO, tmp_path / "out", "--strategy", tmp_path / "strategy.json")
    assert done.returncode == 2
    assert f"'{O_PROJ}': cut: expected" in done.stderr.replace('"', "'")
    assert not (tmp_path / "out").exists()
