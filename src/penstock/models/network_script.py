"""Import a user's network script, name the line where it fails, and prevent a script from exporting itself recursively.

Capture imports the script in a child process.  A script without a ``__main__`` guard opens its model there too, and
that export would import the script again, without end.  Such an import stops at the first nested export.  By then the
script has usually defined its network, which is all that capture needs.  This module does not import PyTorch.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Final

from penstock import env
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError, PenstockError, UnsupportedError
from penstock.validation import nearest

__all__ = ["line_in_stack", "refuse_nested_export", "run_network_script", "script_errors", "split_spec"]

_GUARD: Final = 'put the code that opens models under `if __name__ == "__main__":`'
_MAX_CHARS: Final = 300
_FRAME: Final = re.compile(r'File "([^"]+)", line ([0-9]+)')


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
    raise UnsupportedError(
        f"a network script must not start another export while it is exported; {_GUARD}", param="network"
    )


def split_spec(spec: object) -> tuple[Path, str]:
    """Return the file and the class of ``"path/my_net.py:Net"``.

    Raises InvalidArgumentError for another form, and FileAccessError for a file that does not exist.
    """
    path_text, colon, class_name = spec.rpartition(":") if isinstance(spec, str) else ("", "", "")
    path = Path(path_text)
    if not colon or path.suffix != ".py" or not class_name.isidentifier():
        raise InvalidArgumentError(f"--network: expected path/to/file.py:ClassName, got {spec!r:.80}", param="network")
    if not path.is_file():
        raise FileAccessError(f"--network: {path}: no such file", param="network")
    return path, class_name


def run_network_script(path: Path, class_name: str) -> ModuleType:
    """Import ``path`` and return its module, in which ``class_name`` is defined.

    An import that reaches a nested export or ``sys.exit`` ends there.  Raises InvalidArgumentError when the script has
    not defined ``class_name`` by then, and what ``script_errors`` makes of an error that the script raises.
    """
    running = next((script for script in _imports if script.path == path.resolve()), None)
    if running is not None:
        raise _stop(running)
    spec = importlib.util.spec_from_file_location(f"penstock_network_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InvalidArgumentError(f"--network: {path} cannot be imported", param="network")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and debuggers look it up there
    script = _Import(path)
    _imports.append(script)
    reason = ""
    try:
        with script_errors(path):
            spec.loader.exec_module(module)
    except (Exception, SystemExit, _ScriptStopped) as error:
        # A ``finally`` in the script may have raised another error after the import was stopped.
        if not script.is_stopped and not isinstance(error, SystemExit):
            raise
        reason = "opens a model" if script.is_stopped else "exits"
    finally:
        _imports.remove(script)
    if reason and not hasattr(module, class_name):
        raise InvalidArgumentError(
            f"--network: {path} {reason} before it defines {class_name}; {_GUARD}", param="network"
        )
    return module


@contextmanager
def script_errors(script: Path | None) -> Iterator[None]:
    """Begin the message of an error in the block with the line of ``script``: "net.py:12: NameError: ...".

    A PenstockError keeps its class, and any other exception becomes an InvalidFileError; both are raised ``from`` the
    original.  ``script`` None, a built-in network, and an exception that passed no line of the script change nothing.
    """
    try:
        yield
    except Exception as error:
        line = "" if script is None else _line_of(error, script)
        if not line:
            raise
        if isinstance(error, PenstockError):
            raise error.with_message(f"{line}: {error}") from error
        raise InvalidFileError(f"{line}: {_describe(error)}", param="network") from error


def line_in_stack(stack: str, script: Path | None) -> str:
    """Return "net.py:12", the innermost line of ``script`` in a formatted stack; "" if there is none."""
    if script is None:
        return ""
    lines = [_shown(file, int(line)) for file, line in _FRAME.findall(stack) if _belongs(file, script)]
    return lines[-1] if lines else ""


def _line_of(error: BaseException | None, script: Path) -> str:
    """Return the innermost line of the script, or of a file beside it, that an exception or its cause passed."""
    while error is not None:
        if isinstance(error, SyntaxError) and error.filename and _belongs(error.filename, script):
            return _shown(error.filename, error.lineno or 1)
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        lines = [_shown(file, line) for file, line in frames if _belongs(file, script)]
        if lines:
            return lines[-1]
        error = error.__cause__
    return ""


def _belongs(file: str, script: Path) -> bool:
    return "site-packages" not in file and Path(file).resolve().parent == script.resolve().parent


def _shown(file: str, line: int) -> str:
    relative = os.path.relpath(file)
    return f"{file if relative.startswith(os.pardir) else relative}:{line}"


def _describe(error: Exception) -> str:
    """Return the type and the first paragraph of an exception, and the name that a misspelt attribute may mean."""
    text = error.msg if isinstance(error, SyntaxError) else str(error).split("\n\n")[0]
    text = " ".join(f"{type(error).__name__}: {text}".removesuffix(": ").split())
    if isinstance(error, AttributeError) and error.name is not None and (name := nearest(error.name, dir(error.obj))):
        text += f". Did you mean {name!r}?"
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."
