"""Files of modules that use ``int`` and ``float`` as types, which PyTorch compares by identity."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.graph.general.lower import write_network
from penstock.graph.general.torch.capture import capture_module
from penstock.graph.general.torch.free_builtins import _REPLACED, free_builtins
from penstock.networks.predictor import open_predictor


class Types(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        counted = 3
        kind = 1 if type(counted) is int else 2
        steps = torch.ones(x.shape[1], dtype=int)
        return x * kind, steps + torch.tensor([0, 1, 2], dtype=int), (x > 0).to(float).float(), x.to(int).to(float)


def test_types_of_python_stay_themselves_in_a_capture(tmp_path: Path) -> None:
    module, x = Types().eval(), torch.tensor([[1.5, -2.5, 3.0], [0.5, 4.0, -1.0]])
    write_network(capture_module(module, x, shapes={"x": ("B", 3)}), tmp_path / "net.psm")
    with open_predictor(tmp_path / "net.psm") as predictor:
        for ours, theirs in zip(predictor.run([x.numpy()]), module(x), strict=True):
            np.testing.assert_array_equal(ours, theirs.numpy())


_CALLS = """
def f(x: int, y: "float") -> int:
    z: float = 2.0
    return int(x) + len([*map(int, [y])]) * isinstance(y, (int, float)) * isinstance(y, int | float)
"""
_TYPES = _CALLS + "g = type(3) is int\n"


@contextmanager
def module_in_a_file(source: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[nn.Module, Any]]:
    (path / "of_a_test.py").write_text(source)
    file = types.ModuleType("of_a_test")
    file.__file__ = str(path / "of_a_test.py")
    monkeypatch.setitem(sys.modules, "of_a_test", file)
    yield type("Part", (nn.Module,), {"__module__": "of_a_test"})(), file


@pytest.mark.parametrize(("source", "expected"), [(_CALLS, {"len", "int", "float"}), (_TYPES, {"len", "float"})])
def test_functions_that_a_file_only_calls_are_replaced(
    source: str, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with module_in_a_file(source, tmp_path, monkeypatch) as (module, file):
        before = set(vars(file))
        with free_builtins(module):
            assert set(vars(file)) - before == expected
        assert set(vars(file)) == before


def test_another_thread_waits_while_functions_are_replaced() -> None:
    def enter() -> None:
        entered.append(_REPLACED.acquire(blocking=False))

    entered: list[bool] = []
    with free_builtins(Types()):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert entered == [False]
