"""Eager mode: every op of the table as a PyTorch op, ``torch.ops.penstock.<name>``.

On the CPU an op runs its native kernel, or its PyTorch reference when ``PENSTOCK_REFERENCE=1``; on meta tensors it runs
its shape rule.  A weight argument is a tensor whose shape and dtype determine its layout
(``penstock.ops.reference.packing``); a state is [num_pages, page_elements] of float32, bfloat16, int8 or uint8
(int4), a recurrent one of float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from penstock.core import layouts, native
from penstock.core.layouts import KV_NUMBERS
from penstock.env import use_reference
from penstock.errors import InvalidArgumentError, PenstockError
from penstock.ops import reference
from penstock.ops.pages import page_elements
from penstock.ops.reference.gradients import recording
from penstock.ops.schema import Argument, parse_arguments
from penstock.ops.shapes import OUTPUT_DTYPES, infer_shapes
from penstock.ops.table import OPS, Op

__all__ = ["EagerOp", "core_context", "ops", "record_gradients", "torch_schema", "use_context"]

_DTYPES: Final = {
    torch.float32: layouts.F32,
    torch.float16: layouts.F16,
    torch.bfloat16: layouts.BF16,
    torch.int8: layouts.I8,
    torch.int32: layouts.I32,
    torch.uint8: layouts.U8,
    torch.int64: layouts.I64,
}
_KV_LAYOUTS: Final = {
    torch.float32: KV_NUMBERS["f32"],
    torch.bfloat16: KV_NUMBERS["bf16"],
    torch.int8: KV_NUMBERS["int8"],
    torch.uint8: KV_NUMBERS["int4"],
}
_ROWS: Final = (layouts.ROWS_F32, layouts.ROWS_F16, layouts.ROWS_BF16)
_INPUT_DTYPES: Final = (torch.float32, torch.int32)
_LINEARS: Final = ("linear", "expert_linear", "head_linear")

_context: ContextVar[native.Context | None] = ContextVar("penstock_context", default=None)


@cache
def _default_context() -> native.Context:
    return native.Context()


def core_context() -> native.Context:
    """Return the native context that eager ops run in: that of ``use_context``, or else one with default threads."""
    return _context.get() or _default_context()


@contextlib.contextmanager
def use_context(context: native.Context) -> Iterator[None]:
    """Run the eager ops of the block in ``context``."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


class EagerOp:
    """One op of the table, which runs a call given as tensors and attributes."""

    def __init__(self, op: Op, reference: Callable[..., Any]) -> None:
        self.name = op.name
        arguments = parse_arguments(op.schema)
        self.tensors = tuple(argument for argument in arguments if not argument.is_attr)
        self.attrs = tuple(argument.name for argument in arguments if argument.is_attr)
        self.dtypes = tuple(getattr(torch, name) for name in OUTPUT_DTYPES.get(op.name, ("float32", "float32")))
        self.reference = reference

    def allocate(self, tensors: tuple[Tensor | None, ...], attrs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Return new outputs with the shapes that the op's shape rule gives."""
        shapes = {
            argument.name: None if tensor is None else tensor.shape
            for argument, tensor in zip(self.tensors, tensors, strict=True)
        }
        outputs = infer_shapes(self.name, shapes, attrs)
        device = next(tensor.device for tensor in tensors if tensor is not None)
        return tuple(
            torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(outputs, self.dtypes, strict=False)
        )

    @staticmethod
    def _result(outputs: tuple[Tensor, ...]) -> Any:
        return None if not outputs else outputs[0] if len(outputs) == 1 else outputs

    def fake(self, *tensors: Tensor | None, **attrs: Any) -> Any:
        """Return outputs that have only shapes, for meta tensors."""
        return self._result(self.allocate(tensors, attrs))

    def run(self, *tensors: Tensor | None, **attrs: Any) -> Any:
        """Run the op on CPU tensors."""
        self._check(tensors)
        tensors = tuple(  # holds the copies until the kernel is done; a state or weight is never copied
            _with_whole_rows(tensor) if argument.kind == "tensor" else tensor
            for argument, tensor in zip(self.tensors, tensors, strict=True)
        )
        outputs = self.allocate(tensors, attrs)
        if use_reference():
            return self.reference(*tensors, **attrs)
        arguments = [
            None if tensor is None else _describe(self.name, argument, tensor, tensors, attrs)
            for argument, tensor in zip(self.tensors, tensors, strict=True)
        ]
        arguments += [_plain(tensor) for tensor in outputs]
        try:
            native.run_op(core_context(), self.name, arguments, attrs)
        except PenstockError as error:
            raise error.with_message(f"[{self.name}] {str(error).removeprefix(self.name + ': ')}") from None
        return self._result(outputs)

    def _check(self, tensors: tuple[Tensor | None, ...]) -> None:
        for argument, tensor in zip(self.tensors, tensors, strict=True):
            if argument.kind == "tensor" and tensor is not None and tensor.dtype not in _INPUT_DTYPES:
                raise InvalidArgumentError(
                    f"[{self.name}] {argument.name}: expected float32 or int32, got {tensor.dtype}",
                    param=argument.name,
                )


def _describe(
    op: str, argument: Argument, tensor: Tensor, tensors: tuple[Tensor | None, ...], attrs: dict[str, Any]
) -> native.CoreTensor:
    if argument.kind == "weight":
        return _describe_weight(op, argument, tensor, tensors, attrs)
    if argument.kind == "state":
        heads = 1 if op == "prefix_lengths" else attrs.get("key_heads", attrs.get("blocks"))
        return _describe_state(op, tensor, tensors) if heads is None else _describe_cells(op, tensor, heads)
    return _plain(tensor)


def _with_whole_rows(tensor: Tensor | None) -> Tensor | None:
    """Return ``tensor`` itself if only its first dimension is strided, which kernels accept; else a contiguous copy."""
    if tensor is None or tensor.is_contiguous() or (tensor.ndim > 1 and tensor[0:1].is_contiguous()):
        return tensor
    return tensor.contiguous()


def _plain(tensor: Tensor) -> native.CoreTensor:
    return native.CoreTensor(
        address=tensor.data_ptr(),
        dtype=_DTYPES[tensor.dtype],
        dims=tuple(tensor.shape),
        row_stride=tensor.stride(0) if tensor.ndim else 1,
        layout=0,
    )


def _describe_weight(
    op: str, argument: Argument, weight: Tensor, tensors: tuple[Tensor | None, ...], attrs: dict[str, Any]
) -> native.CoreTensor:
    if not weight.is_contiguous():
        raise InvalidArgumentError(
            f"[{op}] weight: expected a contiguous tensor, got strides {weight.stride()}", param="weight"
        )
    first = tensors[0]
    if weight.ndim == 1:
        dims = (1, weight.shape[0])
    elif weight.ndim == 2 and weight.is_floating_point():
        dims = (weight.shape[0], weight.shape[1])
    elif op in _LINEARS and first is not None:
        dims = (attrs["out_features"] * attrs.get("num_experts", attrs.get("num_heads", 1)), first.shape[-1])
    elif op == "sharded_embedding":
        starts = [int(number) for number in attrs["starts"].split("|")]
        dims = (starts[attrs["rank"] + 1] - starts[attrs["rank"]], attrs["dim"])
    else:
        dims = (weight.shape[0] * 16, attrs["dim"])
    layout = reference.layout_of_tensor(weight)
    if op in _LINEARS and argument.name == "weight" and weight.ndim == 2 and layout in _ROWS:
        raise InvalidArgumentError(
            f"[{op}] weight: expected packed tiles, got a logical matrix. Pack the network first.", param="weight"
        )
    return native.CoreTensor(weight.data_ptr(), _DTYPES[weight.dtype], dims, dims[1], layout)


def _describe_state(op: str, state: Tensor, tensors: tuple[Tensor | None, ...]) -> native.CoreTensor:
    first = tensors[0]
    if first is None or state.dtype not in _KV_LAYOUTS or not state.is_contiguous():
        raise InvalidArgumentError(
            f"[{op}] state: expected a contiguous float32, bfloat16, int8 or uint8 tensor, got {state.dtype}",
            param="state",
        )
    if op in ("latent_append", "latent_attention"):
        rope = tensors[1 if op == "latent_append" else 5]
        return _describe_latents(op, state, first.shape[-1], 0 if rope is None else rope.shape[-1])
    head_dim = first.shape[2]
    num_kv_heads = first.shape[1] if op == "kv_append" else state.shape[1] // page_elements(state.dtype, 1, head_dim)
    expected = page_elements(state.dtype, num_kv_heads, head_dim)
    if expected != state.shape[1] or not num_kv_heads:
        raise InvalidArgumentError(
            f"[{op}] state: expected pages of {expected} elements, got {state.shape[1]}", param="state"
        )
    dims = (state.shape[0], num_kv_heads, head_dim)
    return native.CoreTensor(state.data_ptr(), _DTYPES[state.dtype], dims, state.shape[1], _KV_LAYOUTS[state.dtype])


def _describe_cells(op: str, state: Tensor, heads: int) -> native.CoreTensor:
    """Describe a recurrent state [num_pages, heads * numbers]."""
    if state.dtype != torch.float32 or not state.is_contiguous() or state.shape[1] % heads:
        raise InvalidArgumentError(
            f"[{op}] state: expected contiguous float32 pages of {heads} heads, got {state.dtype} {list(state.shape)}",
            param="state",
        )
    dims = (state.shape[0], heads, state.shape[1] // heads)
    return native.CoreTensor(state.data_ptr(), layouts.F32, dims, state.shape[1], layouts.STATE_F32)


def _describe_latents(op: str, state: Tensor, latent_dim: int, rope_dim: int) -> native.CoreTensor:
    expected = page_elements(state.dtype, 1, latent_dim + rope_dim, latent_dim)
    if expected != state.shape[1]:
        raise InvalidArgumentError(
            f"[{op}] state: expected pages of {expected} elements, got {state.shape[1]}", param="state"
        )
    dims = (state.shape[0], 1, latent_dim + rope_dim, latent_dim)
    return native.CoreTensor(state.data_ptr(), _DTYPES[state.dtype], dims, state.shape[1], _KV_LAYOUTS[state.dtype])


def torch_schema(schema: str) -> str:
    """Return a schema of the table in the syntax of torch.library."""
    return schema.replace("Weight", "Tensor").replace("State(a!)", "Tensor(a!)").replace("State", "Tensor")


def _register(library: Any) -> None:
    for op in OPS:
        eager_op = EagerOp(op, getattr(reference, op.name))
        library.define(op.name + torch_schema(op.schema), tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(op.name, eager_op.run, "CPU")
        torch.library.register_fake(f"penstock::{op.name}", eager_op.fake, lib=library)


@cache
def record_gradients() -> None:
    """Let ops run their references while gradients are recorded; before the first call an op has no gradients."""
    for op in OPS:
        has_state = any(argument.kind == "state" for argument in parse_arguments(op.schema))
        native_op = _below_autograd(getattr(ops, op.name))
        run = recording(op.name, has_state, native_op, getattr(reference, op.name))
        _LIBRARY.impl(op.name, run, "AutogradCPU")  # type: ignore[no-untyped-call]


def _below_autograd(op: Callable[..., Any]) -> Callable[..., Any]:
    def run(*tensors: Tensor | None, **attrs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*tensors, **attrs)

    return run


_LIBRARY: Final = torch.library.Library("penstock", "DEF")  # type: ignore[no-untyped-call]
_register(_LIBRARY)

ops: Final[Any] = torch.ops.penstock
"""The ops as functions.  Importing this name makes sure that they are registered."""
