"""Every family has the same logits in any company: in a batch, in chunks, and with any number of threads.

The tests of ``test_same_in_any_company.py`` are thorough about one decoder; these have experts, latents and states.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.core.native import Context, Model
from penstock.graph.export import export_bundle
from tests.invariants.steps import LEVELS, open_program, run_alone, run_together, same_bits
from tests.support.families import GRAPH_PARAMS, prompt, save
from tests.support.marks import in_turn

LENGTHS = (1, 33, 70)
SCHEMES = ("f32", "bf16", "w8a8", "w4a8")


@pytest.mark.parametrize(("family", "scheme"), in_turn(GRAPH_PARAMS, SCHEMES))
def test_a_family_is_the_same_in_any_company(
    family: str, scheme: str, tmp_path: Path, context_of: Callable[[str, int], Context]
) -> None:
    export_bundle(save(family, tmp_path / family), tmp_path / "model.psm", scheme=scheme)
    with Model.open(tmp_path / "model.psm") as model:
        check_company(model, context_of)


def check_company(model: Model, context_of: Callable[[str, int], Context]) -> None:
    """Check that a prompt has the same logits alone, in chunks, in a batch, and with any number of threads."""
    prompts, groups = [prompt(length) for length in LENGTHS], model.info.num_page_groups
    with open_program(model, context_of(LEVELS[0], 2), sum(LENGTHS)) as program:
        alone = [run_alone(program, ids, groups=groups) for ids in prompts]
        for chunk in (1, 7):
            assert same_bits(alone[2], run_alone(program, prompts[2], chunk, chunk, groups)), f"chunks of {chunk}"
        for chunks in ((70,) * 3, (1, 7, 33)):
            together = run_together(program, prompts, chunks, groups)
            for length, one, other in zip(LENGTHS, alone, together, strict=True):
                assert same_bits(one, other), f"length {length} with chunks {chunks}"
    for num_threads in (1, 3):
        with open_program(model, context_of(LEVELS[0], num_threads), sum(LENGTHS)) as program:
            together = run_together(program, prompts, (1, 33, 20), groups)
            for length, one, other in zip(LENGTHS, alone, together, strict=True):
                assert same_bits(one, other), f"length {length} with {num_threads} threads"
