"""A captured module as a source: PyTorch's eager mode, and the values inside the exported program."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from numpy.typing import NDArray
from torch import fx, nn
from torch.export.graph_signature import OutputKind
from torch.nn.utils import rnn
from torch.utils import _pytree as pytree

__all__ = ["TorchSource", "array_of"]

_TOLERANCES: Final = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
_WHOLE: Final = {"penstock_network.lstm.default": "lstm", "penstock_network.gru.default": "gru"}


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the elements of a tensor, floating-point numbers as float32."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).contiguous().numpy()


class TorchSource:
    """Runs a module, in eval mode, with arrays instead of the tensors of its example."""

    name = "PyTorch's eager mode"

    def __init__(self, module: nn.Module, exported: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module, self._exported = module, exported
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._at = [at for at, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        self.examples: Sequence[NDArray[Any]] | None = [array_of(self._leaves[at]) for at in self._at]
        tensors = [*(self._leaves[at] for at in self._at), *module.parameters(), *module.buffers()]
        self.tolerance = max([1e-4, *(_TOLERANCES.get(tensor.dtype, 0.0) for tensor in tensors)])

    @property
    def output_types(self) -> list[torch.dtype]:
        """The types of the tensors that the module returns."""
        node = next(node for node in reversed(self._exported.graph.nodes) if node.op == "output")
        specs = self._exported.graph_signature.output_specs
        kept = [
            item
            for item, spec in zip(node.args[0], specs, strict=True)
            if spec.kind == OutputKind.USER_OUTPUT and hasattr(item, "meta")
        ]
        return [item.meta["val"].dtype for item in kept]

    def run(self, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the tensors that the module returns."""
        args, kwargs = pytree.tree_unflatten(self._filled(arrays), self._spec)
        with _eval_mode(self._module), torch.no_grad():
            result = self._module(*args, **kwargs)
        return [array_of(item) for item in pytree.tree_leaves(result) if isinstance(item, torch.Tensor)]

    def values(self, arrays: Sequence[NDArray[Any]], keys: Collection[str]) -> dict[str, NDArray[Any]]:
        """Return the results of nodes of the exported program."""
        results: dict[str, NDArray[Any]] = {}
        signature = self._exported.graph_signature
        constants = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        leaves = iter(self._filled(arrays))
        values = []
        for node in self._exported.graph.nodes:
            if node.op == "placeholder":
                target = constants.get(node.name)
                stored = None if target is None else self._exported.state_dict.get(target)
                values.append(
                    next(leaves) if target is None else self._exported.constants[target] if stored is None else stored
                )
        with torch.no_grad():
            _Recorder(self._exported.graph_module, keys, results).run(*values)
        return results

    def _filled(self, arrays: Sequence[NDArray[Any]]) -> list[Any]:
        leaves = list(self._leaves)
        for at, array in zip(self._at, arrays, strict=True):
            leaves[at] = torch.from_numpy(array.copy()).to(leaves[at].device, leaves[at].dtype)
        return leaves


class _Recorder(fx.Interpreter):
    """Keeps the results of some nodes."""

    def __init__(self, module: fx.GraphModule, keys: Collection[str], found: dict[str, NDArray[Any]]) -> None:
        super().__init__(module)
        self._keys, self._found = keys, found

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if node.name in self._keys:
            self._found[node.name] = array_of(result)
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = _WHOLE.get(str(target))
        return super().call_function(target, args, kwargs) if name is None else _recurrent(name, *args, **kwargs)


def _recurrent(
    name: str, x: torch.Tensor, states: Sequence[torch.Tensor], params: Sequence[torch.Tensor], has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Compute a layer that was kept whole (``recurrent.py``) with PyTorch's own op."""
    op: Any = getattr(torch, name)
    flags = params, has_biases, num_layers, dropout, train, bidirectional

    def hidden(given: Sequence[torch.Tensor]) -> Any:
        return list(given) if name == "lstm" else given[0]

    if lengths is None:
        result: tuple[torch.Tensor, ...] = op(x, hidden(states), *flags, batch_first)
        return result
    packed: Any = rnn.pack_padded_sequence(x, lengths, batch_first, enforce_sorted=False)
    sorted_states = [state.index_select(1, packed.sorted_indices) for state in states]
    rows, *last = op(packed.data, packed.batch_sizes, hidden(sorted_states), *flags)
    whole = rnn.PackedSequence(rows, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
    out, _ = rnn.pad_packed_sequence(whole, batch_first, total_length=x.shape[int(batch_first)])
    return (out, *(state.index_select(1, packed.unsorted_indices) for state in last))


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
