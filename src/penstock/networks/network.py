"""A captured network that has no file yet: what it takes and gives, and how it is saved, run and compared."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.general.draft import Draft, Tensor
from penstock.graph.general.lower import write_network
from penstock.graph.general.sizes import as_text
from penstock.networks.check import Inputs, NetworkCheck, check_network
from penstock.networks.predictor import Predictor, open_predictor

if TYPE_CHECKING:
    from torch import nn

    from penstock.graph.general.torch.source import TorchSource

__all__ = ["CapturedNetwork", "CompiledModule", "NetworkTensor", "SavedNetwork", "capture", "compile", "read_network"]


@dataclass(frozen=True)
class NetworkTensor:
    """An input or an output: its name, its type ("f32"), and its sizes as expressions ("B", "3", "32*H_32")."""

    name: str
    dtype: str
    sizes: tuple[str, ...]


@dataclass(frozen=True)
class SavedNetwork:
    """The result of ``CapturedNetwork.save``."""

    path: Path
    num_nodes: int
    num_weights: int
    file_bytes: int


class CapturedNetwork:
    """A network that ``capture`` or ``read_network`` made.  It holds the weights until it is saved or compiled."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    @property
    def name(self) -> str:
        """The name of the class, or of the ONNX file without its suffix."""
        return self._draft.name

    @property
    def inputs(self) -> list[NetworkTensor]:
        """The inputs, in order."""
        return [_info(tensor, tensor.name) for tensor in self._draft.inputs]

    @property
    def outputs(self) -> list[NetworkTensor]:
        """The outputs, in order."""
        named = zip(self._draft.outputs, self._draft.output_names, strict=True)
        return [_info(tensor, name) for tensor, name in named]

    def save(
        self, path: str | os.PathLike[str], *, properties: Mapping[str, str] | None = None, winograd: bool = True
    ) -> SavedNetwork:
        """Write the bundle ``path``, which ends in .psm; it appears complete or not at all.

        ``properties`` are stored as they are, beside those of an ONNX file, for programs that read the bundle.
        ``winograd``: compute convolutions of 3x3 by Winograd's F(2x2, 3x3) where that is faster.  Their weights take
        16/9 of the room, so False is for devices with little memory.
        """
        target = Path(path)
        if target.suffix != ".psm":
            raise InvalidArgumentError(f"path: expected a name that ends in .psm, got {target.name}", param="path")
        graph = write_network(self._draft.copy(), target, properties=properties, winograd=winograd)
        return SavedNetwork(target, len(graph.nodes), len(graph.weights), target.stat().st_size)

    def compile(self, *, threads: int = 0, winograd: bool = True) -> Predictor:
        """Return the network ready to run, without a file that stays.  ``threads`` 0: as many as there are cores.

        ``winograd``: as ``save`` takes it.
        """
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            saved = self.save(Path(folder) / "network.psm", winograd=winograd)
            return open_predictor(saved.path, threads=threads)

    def check(
        self, inputs: Inputs | None = None, *, tolerance: float | None = None, seed: int = 0, winograd: bool = True
    ) -> NetworkCheck:
        """Run the source and the network on the same inputs, and compare their outputs.

        The source is the module in PyTorch's eager mode, or the ONNX file in ONNX Runtime, or in onnx's reference
        evaluator where that is missing.  Without ``inputs``, in order or by name, it runs twice on numbers made from
        ``seed``: at the example's sizes and, where the source takes them, at others.  ``tolerance`` is a part of the
        largest number of a tensor: 1e-4, and more for a source that computes in f16 or bf16.  ``winograd``: compare the
        network that ``save`` with this ``winograd`` writes.

        If an output differs by more, the result names the first node that does, with its place in the source.
        """
        return check_network(self._draft, inputs, tolerance, seed, winograd=winograd)


def _info(tensor: Tensor, name: str) -> NetworkTensor:
    return NetworkTensor(name, tensor.dtype.name.lower(), tuple(as_text(size) for size in tensor.shape))


def capture(
    module: nn.Module, example: Any, *, shapes: Mapping[str, Sequence[Any]] | None = None,
    sizes: Mapping[str, int | tuple[int, ...]] | None = None, name: str = "", check: bool = False,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None, max_seconds: float = 300.0,
) -> CapturedNetwork:  # fmt: skip
    """Capture any ``torch.nn.Module``, in eval mode, with its weights.

    ``example`` is a tensor, a tuple of arguments, or a dict of keyword arguments.  Sizes are the example's unless
    ``shapes`` names them, by argument: ``{"x": ("B", 3, "H", "W")}``.  ``sizes`` gives a named size a range, (least,
    most) or (least, most, multiple).  Floating-point numbers are float32.  ``check`` compares the network with the
    module, as ``CapturedNetwork.check`` does, and raises UnsupportedError (code "network_differs") where it computes
    something else.

    An op of ``torch.library`` becomes a custom op if ``penstock.custom_op`` declares one of its name.
    ``decompositions`` gives others functions of PyTorch's own ops: ``{"owner::name": function}``.

    ``max_seconds`` of this thread's processor time limit the tracing, which free sizes can make endless.

    Raises UnsupportedError with every operation that has no op, for a module that branches on values, for one that
    needs a size that was declared free, and past the limit (code "capture_timeout").
    """
    try:
        from penstock.graph.general.torch.capture import capture_module
    except ModuleNotFoundError as error:
        raise UnsupportedError("capture requires PyTorch: pip install 'penstock[torch]'") from error
    options: dict[str, Any] = {"shapes": shapes, "sizes": sizes, "name": name, "decompositions": decompositions}
    options["max_seconds"] = max_seconds
    network = CapturedNetwork(capture_module(module, example, **options))
    if check:
        network.check().expect_passed()
    return network


def read_network(
    path: str | os.PathLike[str], *, sizes: Mapping[str, Any] | None = None, custom_ops: Mapping[str, str] | None = None
) -> CapturedNetwork:
    """Read an ONNX file; ``sizes`` as in ``penstock.graph.onnx.read_onnx``: {"batch": 1, "H": (32, 1024, 32)}.

    ``custom_ops`` names the op of ``penstock.custom_op`` for an operator of another domain: ``{"com.acme::SquaredRelu":
    "acme::squared_relu"}``.  An op that is called as the operator is, in small letters, is found without it.
    """
    from penstock.graph.onnx.reader import read_onnx

    return CapturedNetwork(read_onnx(path, sizes, custom_ops))


class CompiledModule:
    """A module that was captured and runs in the native core: it takes and returns PyTorch's tensors."""

    def __init__(self, predictor: Predictor, signature: inspect.Signature, types: Sequence[Any]) -> None:
        self._predictor, self._signature, self._types = predictor, signature, types

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network with the arguments of the module's forward.  Returns a tensor, or a tuple of several."""
        import torch

        from penstock.graph.general.torch.source import array_of

        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidArgumentError(f"arguments: {error}", param="arguments") from error
        values = [*bound.args, *bound.kwargs.values()]  # in the order of the module's forward
        arrays = [array_of(value) if isinstance(value, torch.Tensor) else value for value in values]
        results = zip(self._predictor.run(arrays), self._types, strict=True)
        outputs = tuple(torch.from_numpy(array).to(dtype) for array, dtype in results)
        return outputs[0] if len(outputs) == 1 else outputs


def compile(module: nn.Module, example: Any, *, threads: int = 0, **options: Any) -> CompiledModule:
    """Return ``module`` as a function of tensors that the core computes; ``options`` are those of ``capture``."""
    network = capture(module, example, **options)
    types = cast("TorchSource", network._draft.source).output_types
    return CompiledModule(network.compile(threads=threads), inspect.signature(module.forward), types)
