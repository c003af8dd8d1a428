"""The order in which the workers of pytest-xdist begin the files of tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")
TESTS = Path(__file__).parents[1]

SLOWEST = (
    "cluster/test_ray_cluster.py",
    "kernels/test_kernel_objects.py",
    "ranks/test_sanitized_ranks.py",
    "project/test_snippets.py",
    "invariants/test_planted_faults.py",
    "ranks/test_contexts_with_heads_and_stages.py",
    "project/test_clone.py",
    "project/test_neighbours.py",
    "invariants/test_same_in_any_company.py",
    "project/test_add_op.py",
    "devices/test_aarch64.py",
    "devices/test_small.py",
    "networks/test_library_networks.py",
    "symbolic/test_tracer.py",
    "servables/test_storms.py",
    "serving/workers/test_faults.py",
    "serving/http/test_schema.py",
    "cluster/test_ray_chaos.py",
    "offline/test_predictor.py",
    "project/test_site.py",
    "ranks/test_eager_ranks.py",
    "ranks/test_rank_processes.py",
    "servables/test_forks.py",
    "checkpoint/test_pickled.py",
    "devices/test_penstock_lite.py",
    "quant/test_perplexity.py",
    "models/test_encoders.py",
    "cli/test_run.py",
    "cli/test_pull.py",
)
"""Files whose tests take a minute or more.  A worker takes a whole file: one that began such a file last would work on
while the others have nothing to do."""


def in_order(items: Sequence[Item], path_of: Callable[[Item], Path]) -> list[Item]:
    """Return tests in the order of their files: the slowest, then those with the most tests.

    ``path_of`` returns the file of a test.  The tests of a file keep their order.
    """
    places = {TESTS / name: place for place, name in enumerate(SLOWEST)}
    counts = Counter(map(path_of, items))

    def key(item: Item) -> tuple[int, int, str]:
        path = path_of(item)
        return places.get(path, len(places)), -counts[path], str(path)

    return sorted(items, key=key)
