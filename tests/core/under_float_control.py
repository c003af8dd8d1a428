"""Everything that the core computes, called with a floating-point control register of the caller's: prints a checksum.

``python under_float_control.py FOLDER LIBRARY CONTROL``: LIBRARY is float_control.c, CONTROL a number or "default".
Exits with an assertion where a call leaves another register than it found.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.append(str(Path(__file__).parents[2]))

from penstock.core import context as context_module
from penstock.core import native
from penstock.core.library import library, load_ops
from penstock.errors import InvalidArgumentError
from tests.support.core_steps import OPTIONS, batch, sampling
from tests.support.tiny_graph import tiny_graph, tiny_values, write_bundle

PROMPT = [7, 1, 90, 33, 4, 4, 100, 56, 12, 71]


class Hostile:
    """The core's functions, each called with the register ``control``."""

    def __init__(self, register: ctypes.CDLL, control: int) -> None:
        self._register, self._control = register, control
        self._default = register.get_control()

    def __getattr__(self, name: str) -> Any:
        function = getattr(library(), name)

        def call(*arguments: Any) -> Any:
            self._register.set_control(self._control)
            result = function(*arguments)
            left = self._register.get_control()
            self._register.set_control(self._default)
            assert left == self._control, f"{name} left {left:#x}, got {self._control:#x}"
            return result

        return call


def quiet_values(scheme: str) -> dict[str, npt.NDArray[np.float32]]:
    """Weights with which activations and logits are subnormal numbers."""
    values = tiny_values(tiny_graph(scheme))
    for name, value in values.items():
        if name == "embed.weight":
            value *= np.float32(1e-20)
        elif value.shape[0] == 1 and name != "inv_freq":
            value *= np.float32(1e-39 if name.endswith("bias") else 1e-22)
    return values


def weights(context: native.Context) -> list[npt.NDArray[Any]]:
    """Packed weights, quantized and not, and what they unpack to."""
    source = np.random.default_rng(1).standard_normal((40, 64)).astype(np.float32) * np.float32(1e-38)
    found: list[npt.NDArray[Any]] = []
    for layout in (16, 18, 21, 22):
        data = np.zeros(native.layout_bytes(layout, 40, 64), np.uint8)
        native.pack(context, layout, 40, 64, 0, 40, 1, source, data)
        found += [data, native.unpack(context, layout, 40, 64, 0, 40, data)]
    return found


def steps(context: native.Context, path: Path) -> list[npt.NDArray[Any]]:
    """Logits and tokens of steps that two threads share."""
    found: list[npt.NDArray[Any]] = []
    with native.Model.open(path) as model:
        native.plan(model, context, OPTIONS)
        with native.CoreProgram(model, context, OPTIONS) as program:
            greedy = program.step(batch([(0, PROMPT, (1,))]), sampling(len(PROMPT)))
            found += [program.logits().copy(), greedy.ids.copy()]
            warm = {"temperature": np.full(10, 1e-39, np.float32), "top_p": np.full(10, 1e-39, np.float32)}
            found.append(program.sample(sampling(len(PROMPT), **warm)).ids.copy())
            struct = native._options_struct(OPTIONS)
            native.check(native.library().ps_program_resize(program.handle, ctypes.byref(struct)))
            try:
                program.run(batch([(0, [-1], (1,))]))
            except InvalidArgumentError:
                pass
            else:
                raise AssertionError("expected a refusal: nothing was sampled in slot 0")
            program.run(batch([(10, [5], (1,))]))
            found.append(program.logits().copy())
            found.append(native.sample_logits(context, program.logits().copy(), sampling(1)).ids.copy())
    return found


def flush(context: native.Context) -> None:
    """Runs the op of float_control.c, which leaves another register behind, on every thread."""
    x = np.ones((64, 8), np.float32)
    y = np.zeros_like(x)
    native.run_op(context, "tests::flush", [native.CoreTensor(a.ctypes.data, 1, a.shape, 8) for a in (x, y)], {})
    assert np.array_equal(x, y)


def norm(context: native.Context) -> npt.NDArray[np.float32]:
    """One op, as eager mode runs it."""
    x = np.random.default_rng(2).standard_normal((9, 48)).astype(np.float32) * np.float32(1e-20)
    weight, y = np.full((1, 48), 1e-22, np.float32), np.zeros((9, 48), np.float32)
    tensors = [native.CoreTensor(a.ctypes.data, 1, a.shape, 48, layout) for a, layout in ((x, 0), (weight, 1), (y, 0))]
    native.run_op(context, "rms_norm", tensors, {"eps": 1e-6})
    return y


def main(folder: Path, register_file: str, control: str) -> None:
    register = ctypes.CDLL(register_file)
    register.set_control.restype, register.set_control.argtypes = None, [ctypes.c_uint64]
    register.get_control.restype, register.get_control.argtypes = ctypes.c_uint64, []
    paths = [
        write_bundle(folder / f"{scheme}.psm", tiny_graph(scheme), values=quiet_values(scheme))
        for scheme in ("f32", "w8a8")
    ]
    paths.append(write_bundle(folder / "loud.psm", tiny_graph("w8a8")))
    if control != "default":
        hostile = Hostile(register, int(control, 0))
        native.library = context_module.library = lambda: hostile  # type: ignore[assignment,return-value]
    native.cpu_levels()
    found: list[npt.NDArray[Any]] = []
    with native.Context(2) as context:
        if control != "default":
            load_ops(register_file)
            flush(context)
        found += [*weights(context), norm(context)]
        for path in paths:
            found += steps(context, path)
        rate = ctypes.c_double()
        native.check(native.library().ps_probe_compute(context.handle, 1, 0.001, ctypes.byref(rate)))
        native.check(native.library().ps_probe_bandwidth(context.handle, 65536, 1, ctypes.byref(rate)))
    logits = next(array for array in found if array.shape == (10, 101))
    assert 0 < np.abs(logits).max() < np.finfo(np.float32).tiny, "expected subnormal logits"
    print(hashlib.sha256(b"".join(array.tobytes() for array in found)).hexdigest())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
