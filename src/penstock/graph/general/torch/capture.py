"""Capture of any ``torch.nn.Module`` as a draft.

``torch.export`` runs the module once.  About 150 ops have a reader, and PyTorch splits others into those.  The sizes of
its inputs may be free.  Guards of PyTorch never reach the user.
"""

from __future__ import annotations

import inspect
import io
import logging
import operator
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, redirect_stderr
from typing import Any, Final

import torch
from torch import fx, nn
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from penstock.errors import InvalidArgumentError, PenstockError, UnsupportedError
from penstock.graph.general.draft import Draft, Shape, Tensor
from penstock.graph.general.selections import bound_selections
from penstock.graph.general.sizes import (
    SizeExpression,
    SizeLike,
    as_text,
    is_equal,
    largest,
    smallest,
    symbol,
)
from penstock.graph.general.torch import cells, detection, elementwise, layers, sampling, shapes, volumes
from penstock.graph.general.torch.assigned import assigned_attributes, changed_attributes, refuse_states
from penstock.graph.general.torch.declared import add_declared_op, advice, overloads
from penstock.graph.general.torch.decompose import decomposed
from penstock.graph.general.torch.free_builtins import FreeFunctions, free_builtins
from penstock.graph.general.torch.numbers import FreeNumber, number_of, rounded_size, whole_quotients
from penstock.graph.general.torch.recurrent import whole_recurrent_layers
from penstock.graph.general.torch.refusals import is_data_dependent, missing_ops, not_exported, refusal
from penstock.graph.general.torch.size_numbers import has_size_numbers, size_numbers
from penstock.graph.general.torch.source import TorchSource, array_of
from penstock.graph.general.torch.time_limit import TimeLimit
from penstock.graph.general.torch.writer import OPS, Writer, dtype_named
from penstock.graph.ir import DType

__all__ = ["capture_module"]

_READERS: Final = (
    cells,
    detection,
    elementwise,
    layers,
    sampling,
    shapes,
    volumes,
)  # importing them declares the readers
_MAX_SIZE: Final = 1 << 20
_MAX_NARROWED: Final = 4
_CHECKS: Final = (
    *("aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten._assert_async.msg"),
    *("aten.sym_constrain_range.default", "aten.sym_constrain_range_for_size.default"),
)
_CONVERTED: Final = {(DType.I64, DType.I32), (DType.BOOL, DType.U8), (DType.I64, DType.U8), (DType.I64, DType.I8)}
"""The types of results that PyTorch gives in a smaller one: the elements are the same, or wrap."""

_Replacement = Callable[[nn.Module], AbstractContextManager[Any]]
Sizes = Mapping[str, "int | tuple[int, ...]"]


def capture_module(
    module: nn.Module, example: Any, *, shapes: Mapping[str, Sequence[Any]] | None = None, sizes: Sizes | None = None,
    name: str = "", decompositions: Mapping[Any, Callable[..., Any]] | None = None, max_seconds: float = 300.0,
) -> Draft:  # fmt: skip
    """Capture ``module``, in eval mode, with the arguments of ``example``: a tensor, a tuple, or keyword arguments.

    ``shapes`` gives free sizes names, by argument: ``{"image": ("B", 3, "H", "W")}``; a number or None keeps the
    example's.  ``sizes`` limits them: (least, most), or (least, most, multiple).  ``decompositions`` gives ops of
    ``torch.library``, by name, functions in whose calls they are captured.  ``max_seconds`` of this thread's processor
    time limit the tracing, which free sizes can make endless.  Raises UnsupportedError for an operation without a
    reader, with the module that calls it, for a module that fixes a size or branches on values, and past the limit
    (code "capture_timeout").
    """
    args, kwargs, names = _bound_arguments(module, *_arguments(example))
    for param, given in (("shapes", shapes), ("sizes", sizes)):
        if given is not None and not isinstance(given, Mapping):
            raise InvalidArgumentError(f"{param}: expected a dict, got {given!r}", param=param)
    free = _FreeSizes(sizes or {})
    for key, value in names.items():
        free.add_argument(value, key, shapes or {})
    unknown = set(shapes or {}) - set(names)
    if unknown:
        raise InvalidArgumentError(f"shapes: expected {', '.join(names)}, got {sorted(unknown)}", param="shapes")
    free.check()
    args, kwargs = free.widened(args, kwargs)
    limit = TimeLimit(max_seconds, {name for axes in free.axes for name in axes.values()})
    modes = [(part, part.training) for part in module.modules()]
    table = overloads(decompositions or {})
    name = name or type(module).__name__
    module.eval()
    try:
        exported, draft = _read(module, args, kwargs, free, names, table, limit, name)
    finally:
        for part, training in modes:
            part.training = training
    draft.source = TorchSource(module, exported, args, kwargs)
    return draft


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


def _bound_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """Return the arguments in the order of ``forward``, in which PyTorch counts them, and all of them by name."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidArgumentError(f"example: {type(module).__name__}.forward: {error}", param="example") from error
    return bound.args, bound.kwargs, dict(bound.arguments)


class _FreeSizes:
    """Names of free sizes, their ranges, and PyTorch's dimensions for them."""

    def __init__(self, sizes: Sizes) -> None:
        self.ranges = {key: _checked_range(key, value) for key, value in sizes.items()}
        self.dims: dict[str, Any] = {}
        self.axes: list[dict[int, str]] = []  # of each tensor of the arguments, in order: the names of its free sizes
        self.examples: dict[str, tuple[int, str]] = {}  # of each name: the example's size, and where it is

    def add_argument(self, value: Any, key: str, shapes: Mapping[str, Sequence[Any]]) -> None:
        """Remember the free axes of the tensors of an argument."""
        names = shapes.get(key)
        if names is None:
            self.axes += [{} for _ in pytree.tree_leaves(value)]
            return
        is_fitting = isinstance(value, torch.Tensor) and isinstance(names, Sequence) and len(names) == value.dim()
        if not is_fitting:
            raise InvalidArgumentError(f"shapes: {key}: expected one name for each axis of a tensor", param="shapes")
        for axis, (declared, size) in enumerate(zip(names, value.shape, strict=True)):
            self._check_axis(f"{key}: axis {axis}", declared, size)
        strings = {axis: n for axis, n in enumerate(names) if isinstance(n, str)}
        self.axes.append({axis: n for axis, n in strings.items() if not isinstance(self.ranges.get(n), int)})

    def _check_axis(self, place: str, declared: Any, size: int) -> None:
        """Compare what ``shapes`` says of an axis with the example's size."""
        if declared is None:
            return
        if not isinstance(declared, str):
            if not isinstance(declared, int):
                raise InvalidArgumentError(
                    f"shapes: {place}: expected a name, a number or None, got {declared!r}", param="shapes"
                )
            if declared != size:
                raise InvalidArgumentError(
                    f"shapes: {place}: expected {size}, the example's size, or a name, got {declared}", param="shapes"
                )
            return
        known, other = self.examples.setdefault(declared, (size, place))
        if known != size:
            raise InvalidArgumentError(
                f"shapes: {place}: expected {declared} to be {known} in the example, as in {other}, got {size}",
                param="shapes",
            )

    def check(self) -> None:
        """Compare the ranges with the names of ``shapes`` and the sizes of the example."""
        unknown = set(self.ranges) - set(self.examples)
        if unknown:
            known = ", ".join(self.examples) or "none, as shapes names no size"
            raise InvalidArgumentError(f"sizes: expected {known}, got {', '.join(sorted(unknown))}", param="sizes")
        for name, limits in self.ranges.items():
            size, place = self.examples[name]
            if isinstance(limits, int):
                if limits != size:
                    raise InvalidArgumentError(
                        f"sizes: {name}: expected {size}, the example's size, or a range, got {limits}; "
                        "give an example of that size",
                        param="sizes",
                    )
            elif not limits[0] <= size <= limits[1] or size % limits[2]:
                steps = f" in steps of {limits[2]}" if limits[2] > 1 else ""
                raise InvalidArgumentError(
                    f"example: {place}: expected {limits[0]} to {limits[1]}{steps}, the range of {name} in sizes, "
                    f"got {size}",
                    param="example",
                )

    def dynamic(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return PyTorch's dimensions for the arguments."""
        self.dims.clear()
        axes = iter(self.axes)
        return {
            key: pytree.tree_map(lambda _: {axis: self._dim(n) for axis, n in next(axes).items()} or None, value)
            for key, value in arguments.items()
        }

    def narrow(self, message: str) -> bool:
        """Narrow ranges to those that PyTorch's message suggests; return False if it suggests none."""
        narrowed = False
        for own, low, high in re.findall(r"(\w+) = Dim\('\w+', (?:min=(\d+))?(?:, )?(?:max=(\d+))?\)", message):
            for name in self.dims:
                symbol_name, least, most, multiple = self.limits(name)
                if symbol_name == own:
                    least, most = max(least, int(low or 0)), min(most, int(high or most))
                    narrowed |= (least, most) != self.limits(name)[1:3]
                    self.ranges[name] = (least * multiple, most * multiple, multiple)
        return narrowed

    def widened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with free sizes of 1 made 2: PyTorch takes a size of 1 to be fixed."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for at, axes in enumerate(self.axes):
            for axis in axes:
                if leaves[at].shape[axis] == 1:
                    leaves[at] = torch.cat([leaves[at], leaves[at]], axis)
        return pytree.tree_unflatten(leaves, spec)  # type: ignore[no-any-return]

    def _dim(self, name: str) -> Any:
        if not name.isidentifier() or not name.isascii():
            raise InvalidArgumentError(f"shapes: expected a name for a free size, got {name!r}", param="shapes")
        if name not in self.dims:
            own, low, high, multiple = self.limits(name)
            dim = torch.export.Dim(own, min=low, max=high)
            self.dims[name] = dim if multiple == 1 else multiple * dim
        return self.dims[name]

    def symbols(self) -> dict[str, str]:
        """Return the names of the sizes in steps by PyTorch's symbols for them."""
        return {own: name for name in self.dims for own in self.limits(name)[:1] if own != name}

    def limits(self, name: str) -> tuple[str, int, int, int]:
        """Return the symbol of a size, its least and most, and what it is multiplied by."""
        low, high, multiple = self.ranges.get(name, (1, _MAX_SIZE, 1))
        return name if multiple == 1 else f"{name}_{multiple}", -(-low // multiple), high // multiple, multiple


def _checked_range(name: str, value: Any) -> Any:
    if isinstance(value, int):
        return value
    numbers = tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(numbers) == 2:
        numbers = (*numbers, 1)
    if len(numbers) != 3 or not all(isinstance(n, int) and n > 0 for n in numbers) or numbers[0] > numbers[1]:
        raise InvalidArgumentError(
            f"sizes: {name}: expected (least, most) or (least, most, multiple), got {value!r}", param="sizes"
        )
    if numbers[1] // numbers[2] * numbers[2] < numbers[0]:
        raise InvalidArgumentError(
            f"sizes: {name}: expected a range that holds a multiple of {numbers[2]}, got {value!r}", param="sizes"
        )
    return numbers[0] if numbers[0] == numbers[1] else numbers


def _read(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], free: _FreeSizes, names: Any, table: Any,
    limit: TimeLimit, name: str,
) -> tuple[Any, Draft]:  # fmt: skip
    """Export and read the module; numbers of it that are tensors are taken for numbers if a size depends on one."""
    replaced: list[_Replacement] = [free_builtins]
    exported = _export(module, args, kwargs, free, names, table, limit, replaced)
    try:
        return exported, _Capture(exported, free, name).run()
    except UnsupportedError as error:
        if error.code != "data_dependent" or size_numbers in replaced or not has_size_numbers(module):
            raise
    exported = _export(module, args, kwargs, free, names, table, limit, [free_builtins, size_numbers])
    return exported, _Capture(exported, free, name).run()


def _export(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], free: _FreeSizes, names: Any, table: Any,
    limit: TimeLimit, replaced: list[_Replacement],
) -> Any:  # fmt: skip
    """Export the module; a range of a free size that PyTorch finds too wide is narrowed to what it finds.

    After an error that says nothing of sizes or values, Python's own ``int``, ``float`` and ``len`` are tried, and
    after one about the value of a tensor, numbers of the module that are tensors are taken for numbers.  ``replaced``
    becomes what has succeeded.
    """
    first: Exception | None = None
    for _ in range(_MAX_NARROWED + 1):
        try:
            contexts = [context(module) for context in replaced]
            exported, assigned = _export_once(module, args, kwargs, free.dynamic(names), table, contexts, limit)
            read = set(exported.graph_signature.inputs_to_lifted_tensor_constants.values())
            refuse_states(changed_attributes(module, args, kwargs, assigned & read))
            return exported
        except PenstockError:
            raise
        except Exception as error:  # torch.export raises many kinds
            limit.check()
            if free.narrow(str(error)):
                continue
            if is_data_dependent(error) and size_numbers not in replaced and has_size_numbers(module):
                replaced.append(size_numbers)
                first = error
                continue
            refused = refusal(error, free.symbols()) or (first and refusal(first, free.symbols()))
            first = first or error
            if free_builtins not in replaced or refused:
                raise refused or not_exported(first) from first
            replaced.remove(free_builtins)
    raise UnsupportedError("capture: the ranges of the free sizes do not settle; give them in sizes", param="sizes")


def _export_once(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: dict[str, Any], table: Any,
    contexts: Sequence[AbstractContextManager[Any]], limit: TimeLimit,
) -> Any:  # fmt: skip
    loggers = [logging.getLogger("torch"), logging.getLogger("torch.__trace")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with (
            torch.no_grad(), warnings.catch_warnings(), whole_recurrent_layers(), whole_quotients(), limit,
            redirect_stderr(io.StringIO()), FreeFunctions(), ExitStack() as stack,
        ):  # fmt: skip
            for context in contexts:
                stack.enter_context(context)
            assigned = stack.enter_context(assigned_attributes(module))
            warnings.simplefilter("ignore")
            exported = torch.export.export(
                module, args, kwargs, dynamic_shapes=dynamic, strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )  # fmt: skip
            limit.check()
            result = decomposed(exported, {*OPS, *_CHECKS}, table)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    limit.check()
    return result, assigned


class _Capture:
    """Reads the exported nodes in order."""

    def __init__(self, exported: Any, free: _FreeSizes, name: str) -> None:
        self.exported, self.free = exported, free
        self.draft = Draft(name)
        self.writer = Writer(self.draft)
        self.values: dict[fx.Node, Any] = {}
        self.symbols: dict[Any, SizeExpression] = {}
        self.missing: dict[str, str] = {}
        self.num_inputs = 0

    def run(self) -> Draft:
        signature = self.exported.graph_signature
        constants = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        for node in self.exported.graph.nodes:
            if node.op == "placeholder":
                self._add_placeholder(node, constants)
        for node in self.exported.graph.nodes:
            if node.op == "call_function":
                self._add_call(node)
                op, place = _source_of(node)
                self.draft.origin(node.name, f"{place} ({op})", self.values.get(node))
            elif node.op == "output":
                self._refuse_missing()
                self._add_outputs(node)
        bound_selections(self.draft)
        return self.draft

    def _add_placeholder(self, node: fx.Node, constants: Mapping[str, str]) -> None:
        if node.name in constants:
            target = constants[node.name]
            tensor = self.exported.state_dict.get(target)
            tensor = self.exported.constants[target] if tensor is None else tensor
            self.values[node] = self.draft.constant(array_of(tensor), target)
            return
        value = node.meta.get("val")
        axes = self.free.axes[self.num_inputs] if self.num_inputs < len(self.free.axes) else {}
        self.num_inputs += 1
        if not isinstance(value, torch.Tensor):
            self.values[node] = value
            return
        self._declare_sizes(value, axes)
        shape = tuple(self._size(size) for size in value.shape)
        self.values[node] = self.draft.input(node.name, dtype_named(value.dtype), shape)

    def _size(self, size: Any) -> SizeLike:
        return int(size) if isinstance(size, int) else self._expression(size.node.expr)

    def _expression(self, expr: Any) -> SizeLike:
        if expr.is_Integer:
            return int(expr)
        if expr.is_Symbol:
            return self._symbol(expr)
        rounded = rounded_size(expr, self._expression)
        if rounded is not None:
            return rounded
        args = [self._expression(arg) for arg in expr.args]
        kind = type(expr).__name__
        if expr.is_Add or expr.is_Mul:
            result = args[0]
            for arg in args[1:]:
                result = result + arg if expr.is_Add else result * arg
            return result
        if expr.is_Pow and isinstance(args[1], int) and args[1] > 0:
            result = args[0]
            for _ in range(args[1] - 1):
                result = result * args[0]
            return result
        if kind in ("FloorDiv", "CleanDiv"):
            return args[0] // args[1]
        if kind in ("Mod", "PythonMod"):
            return args[0] % args[1]
        if kind in ("Max", "Min"):
            result = args[0]
            for arg in args[1:]:
                result = largest(result, arg) if kind == "Max" else smallest(result, arg)
            return result
        raise UnsupportedError(f"capture: a size is {expr}, which no expression of sizes is")

    def _symbol(self, expr: Any) -> SizeExpression:
        if expr not in self.symbols:
            raise UnsupportedError(
                f"capture: the module makes a shape of values ({expr})", code="data_dependent", param="module"
            )
        return self.symbols[expr]

    def _declare_sizes(self, value: torch.Tensor, axes: Mapping[int, str]) -> None:
        for axis, name in axes.items():
            size = value.shape[axis]
            if isinstance(size, int) or not size.node.expr.free_symbols:
                raise UnsupportedError(
                    f"capture: the module fixes the size {name} to that of the example; leave it out of shapes",
                    param="shapes",
                )
            own, low, high, _ = self.free.limits(name)
            for expr in size.node.expr.free_symbols:
                self.symbols.setdefault(expr, symbol(own, low, high))

    def _add_call(self, node: fx.Node) -> None:
        target = node.target
        if target is operator.getitem:
            source, index = node.args
            self.values[node] = self.values[source][index]  # type: ignore[index]
            return
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            self.values[node] = self._size(value)
            return
        if isinstance(value, torch.SymFloat):
            self.values[node] = FreeNumber(value.node.expr)
            return
        if str(target) in _CHECKS or isinstance(value, (torch.SymBool, bool)):
            return
        read = OPS.get(str(target))
        op, place = _source_of(node)
        if read is None and add_declared_op(self.draft, node, place, self._argument, self._types, self.values):
            return
        if read is None:
            self.missing.setdefault(op if op == str(target) else f"{op} (its part {target})", place)
            try:
                self.values[node] = self._stand_in(value)
            except UnsupportedError:  # its size depends on values
                self._refuse_missing()
            return
        self.writer.name = place
        args, kwargs = self._argument(node.args), self._argument(node.kwargs)
        try:
            self.values[node] = self._typed(read(self.writer, *args, **kwargs), value)
        except PenstockError as error:
            self._refuse_missing()  # which may be why
            text = str(error).removeprefix(f"{place}: ")
            raise error.with_message(f"capture: {op} in {place}: {text}") from error
        except (ArithmeticError, LookupError, ValueError, TypeError, AttributeError) as error:
            self._refuse_missing()  # which may be why
            raise UnsupportedError(f"capture: {op} in {place}: there is no op for its arguments: {error}") from error

    def _stand_in(self, value: Any) -> Any:
        """Return a tensor for the result of an op without a reader, so that all of them are found."""
        if isinstance(value, torch.Tensor) and not value.is_complex():  # no op takes complex numbers
            return Tensor("missing", dtype_named(value.dtype), tuple(self._size(size) for size in value.shape))
        if isinstance(value, (tuple, list)):
            return [self._stand_in(item) for item in value]
        return None

    def _typed(self, result: Any, value: Any) -> Any:
        """Return what a reader made in the type that PyTorch gives it.  Refuses another kind of type or shape."""
        if not isinstance(result, Tensor) or not isinstance(value, torch.Tensor):
            return result
        dtype = dtype_named(value.dtype)
        self._name_selection(result, value)
        try:
            shape = tuple(self._size(size) for size in value.shape)
        except UnsupportedError:  # a size by PyTorch's own formula for it: the reader has another
            shape = result.shape
        is_same = len(shape) == result.rank and all(
            is_equal(a, b) is not False for a, b in zip(shape, result.shape, strict=True)
        )
        if not is_same or (result.dtype != dtype and (result.dtype, dtype) not in _CONVERTED):
            sizes = ", ".join(as_text(size) for size in shape)
            raise ValueError(f"expected {dtype.name.lower()} [{sizes}], got {result}")
        return self.writer.cast(result, dtype)

    def _name_selection(self, result: Tensor, value: torch.Tensor) -> None:
        """Remember PyTorch's symbol for the number of boxes that an op selects."""
        for own, size in zip(result.shape, value.shape, strict=False):
            if not isinstance(own, SizeExpression) or not isinstance(size, torch.SymInt):
                continue
            expr = size.node.expr
            if expr.is_Symbol and self.draft.is_open(own):
                self.symbols.setdefault(expr, own)

    def _types(self, value: Any) -> list[tuple[DType, Shape]]:
        """Return the types of the result of a node."""
        tensors = [value] if isinstance(value, torch.Tensor) else list(value)
        return [(dtype_named(t.dtype), tuple(self._size(size) for size in t.shape)) for t in tensors]

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            known = self.values.get(value)
            return number_of(self.writer, known.expr, self._expression) if isinstance(known, FreeNumber) else known
        if isinstance(value, (list, tuple)):
            return (
                [self._argument(item) for item in value]
                if isinstance(value, list)
                else tuple(map(self._argument, value))
            )
        if isinstance(value, dict):
            return {key: self._argument(item) for key, item in value.items()}
        return self._size(value) if isinstance(value, torch.SymInt) else value

    def _refuse_missing(self) -> None:
        if self.missing:
            raise missing_ops(self.missing, advice(self.missing))

    def _add_outputs(self, node: fx.Node) -> None:
        outputs = []
        specs = self.exported.graph_signature.output_specs
        for at, (given, spec) in enumerate(zip(node.args[0], specs, strict=True)):  # type: ignore[arg-type]
            item = self.values.get(given) if isinstance(given, fx.Node) else given
            if spec.kind == OutputKind.USER_INPUT_MUTATION:
                continue  # callers keep their arrays
            if spec.kind != OutputKind.USER_OUTPUT:
                raise UnsupportedError(
                    f"capture: the module changes its buffer {spec.target} while it runs, which a bundle cannot keep",
                    param=str(spec.target),
                )
            if given is None:
                continue
            if not isinstance(item, Tensor):
                first = next(i for i, other in enumerate(specs) if other.kind == OutputKind.USER_OUTPUT)
                raise UnsupportedError(
                    f"capture: output {at - first}: expected a tensor, got {given}; return tensors only", param="output"
                )
            outputs.append(item)
        for index, tensor in enumerate(outputs):
            self.draft.output("output" if len(outputs) == 1 else f"output_{index}", tensor)


def _source_of(node: fx.Node) -> tuple[str, str]:
    """Return the op that the module calls, which a decomposition may have split, and the path of its call."""
    name, op = node.name, str(node.target)
    sources = node.meta.get("from_node") or []
    while sources:
        source = sources[-1]
        if str(source.target).count(".") == 2:  # an op; others are placeholders and outputs
            name, op = source.name, str(source.target)
        sources = source.from_node
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if path]
    return op, f"{paths[-1]}.{name}" if paths else name
