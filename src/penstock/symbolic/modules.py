"""Modules as those of ``torch.nn``: they have names for their parts, but compute only while a network is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

from penstock.errors import UnsupportedError
from penstock.extras import install_command
from penstock.symbolic.arrays import Array
from penstock.symbolic.tensor import untraceable

__all__ = ["Identity", "Module", "ModuleDict", "ModuleList", "Parameter"]


class Parameter(Array):
    """An array that a checkpoint has."""

    def __init__(self, data: Array, requires_grad: bool = False) -> None:
        super().__init__(data.shape, data.values, data.dtype)


class Module:
    """A part of a network.  Parameters, buffers and modules that are set as attributes belong to it, in their order."""

    forward: Callable[..., Any]

    def __init__(self) -> None:
        self.__dict__.update(_parameters={}, _buffers={}, _modules={})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{type(self).__name__}: computing with a network needs PyTorch. Run `{install_command('torch')}`."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        kinds = {"_parameters": Parameter, "_modules": Module}
        own = next((key for key, kind in kinds.items() if isinstance(value, kind)), None)
        tables = ("_parameters", "_buffers", "_modules")
        if own is None:
            own = next((key for key in tables if name in self.__dict__.get(key, ())), None)
        if own is None:
            object.__setattr__(self, name, value)
            return
        self.__dict__.pop(name, None)
        for key in tables:
            if key != own:
                self.__dict__[key].pop(name, None)
        self.__dict__[own][name] = value

    def __getattr__(self, name: str) -> Any:
        for key in ("_parameters", "_buffers", "_modules"):
            table = self.__dict__.get(key, {})
            if name in table:
                return table[name]
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __delattr__(self, name: str) -> None:
        for key in ("_parameters", "_buffers", "_modules"):
            if name in self.__dict__[key]:
                del self.__dict__[key][name]
                return
        object.__delattr__(self, name)

    def register_buffer(self, name: str, tensor: Array | None, persistent: bool = True) -> None:
        """Give the module a constant or a state."""
        self._buffers[name] = tensor

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Give the module a parameter."""
        self._parameters[name] = param

    def add_module(self, name: str, module: Module | None) -> None:
        """Give the module a part, whose name need not be one of Python."""
        self._modules[name] = module

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield the modules of this one, each once."""
        seen = set()
        for name, module in self._modules.items():
            if module is not None and module not in seen:
                seen.add(module)
                yield name, module

    def children(self) -> Iterator[Module]:
        """Yield the modules of this one, each once."""
        for _, module in self.named_children():
            yield module

    def named_modules(
        self, memo: set[Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Module]]:
        """Yield this module and those inside it with their paths; a shared one once unless told otherwise."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, module in self._modules.items():
            if module is not None:
                yield from module.named_modules(memo, f"{prefix}.{name}" if prefix else name, remove_duplicate)

    def modules(self) -> Iterator[Module]:
        """Yield this module and those inside it, each once."""
        for _, module in self.named_modules():
            yield module

    def _named(self, table: str, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
        seen = set()
        modules = self.named_modules(prefix=prefix, remove_duplicate=remove_duplicate) if recurse else [(prefix, self)]
        for path, module in modules:
            for name, value in module.__dict__[table].items():
                if value is None or value in seen:
                    continue
                if remove_duplicate:
                    seen.add(value)
                yield f"{path}.{name}" if path else name, value

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters with their paths; a shared one once unless ``remove_duplicate`` is False."""
        return self._named("_parameters", prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Array]]:
        """Yield the buffers with their paths."""
        return self._named("_buffers", prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Yield the parameters, each once."""
        for _, parameter in self.named_parameters(recurse=recurse):
            yield parameter

    def get_submodule(self, target: str) -> Any:
        """Return the module at a path; "" is this one."""
        module: Any = self
        for name in target.split(".") if target else ():
            module = module.__dict__["_modules"].get(name) if isinstance(module, Module) else None
        if not isinstance(module, Module):
            raise AttributeError(f"{type(self).__name__!r} has no module {target!r}")
        return module

    def get_parameter(self, target: str) -> Any:
        """Return the parameter at a path."""
        path, _, name = target.rpartition(".")
        return getattr(self.get_submodule(path), name)

    def eval(self) -> Self:
        """Return the module: there is no training."""
        return self

    def extra_repr(self) -> str:
        """Return what ``print`` shows of the module itself."""
        return ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


class Identity(Module):
    """A module that returns what it is called with."""

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0]


class ModuleList(Module):
    """Modules in a list; their names are their numbers."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> Self:
        """Add a module at the end."""
        self.add_module(str(len(self)), module)
        return self

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._modules.values()))

    def __getitem__(self, index: int) -> Any:
        return list(self._modules.values())[index]

    def __setitem__(self, index: int, module: Module) -> None:
        self._modules[list(self._modules)[index]] = module


class ModuleDict(Module):
    """Modules by name."""

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        super().__init__()
        for name, module in (modules or {}).items():
            self.add_module(name, module)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def __getitem__(self, name: str) -> Any:
        return self._modules[name]

    def __setitem__(self, name: str, module: Module) -> None:
        self.add_module(name, module)

    def items(self) -> Iterable[tuple[str, Any]]:
        """Return names and modules."""
        return list(self._modules.items())

    def keys(self) -> Iterable[str]:
        """Return the names."""
        return list(self._modules)

    def values(self) -> Iterable[Any]:
        """Return the modules."""
        return list(self._modules.values())


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r:.60}")
    raise untraceable(f"torch.nn.{name:.60}", "a layer of penstock.nn")
