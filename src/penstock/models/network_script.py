"""Import a user's network script, and prevent a script that opens its own model from exporting itself recursively.

Capture imports the script in a child process.  A script without a ``__main__`` guard opens its model there too, and
that export would import the script again, without end.  Such an import stops at the first nested export.  By then the
script has usually defined its network, which is all that capture needs.  This module does not import PyTorch.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

from penstock import env
from penstock.errors import InvalidArgumentError, UnsupportedError

__all__ = ["refuse_nested_export", "run_network_script"]

_GUARD: Final = 'put the code that opens models under `if __name__ == "__main__":`'


class _ScriptStopped(BaseException):
    """Ends the import of a script.  A BaseException, so that no ``except Exception`` in the script catches it."""


class _Import:
    """The import of a script that is in progress."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.is_stopped = False


_imports: list[_Import] = []
"""The imports in progress in this process, the innermost last."""


def _stop(script: _Import) -> _ScriptStopped:
    script.is_stopped = True
    return _ScriptStopped(f"{script.path}: a network script must not open its own model while it is imported; {_GUARD}")


def refuse_nested_export() -> None:
    """Refuse to export in a process that is itself an export, or that such a process started.

    Stops the import of the calling network script, or raises UnsupportedError when no script is being imported.
    """
    if not env.in_export_child():
        return
    if _imports:
        raise _stop(_imports[-1])
    raise UnsupportedError(f"a network script must not start another export while it is exported; {_GUARD}")


def run_network_script(path: Path, class_name: str) -> ModuleType:
    """Import ``path`` and return its module, in which ``class_name`` is defined.

    An import that reaches a nested export or ``sys.exit`` ends there.  Raises InvalidArgumentError when the script has
    not defined ``class_name`` by then, and any other error that the script raises.
    """
    running = next((script for script in _imports if script.path == path.resolve()), None)
    if running is not None:
        raise _stop(running)
    spec = importlib.util.spec_from_file_location(f"penstock_network_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InvalidArgumentError(f"--network: {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and debuggers look it up there
    script = _Import(path)
    _imports.append(script)
    ended = ""
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit, _ScriptStopped) as error:
        # A ``finally`` in the script may have raised another error after the import was stopped.
        if not script.is_stopped and not isinstance(error, SystemExit):
            raise
        ended = "opens a model" if script.is_stopped else "exits"
    finally:
        _imports.remove(script)
    if ended and not hasattr(module, class_name):
        raise InvalidArgumentError(f"--network: {path} {ended} before it defines {class_name}; {_GUARD}")
    return module
