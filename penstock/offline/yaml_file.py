"""YAML as configuration files use it: plain values, every key once."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final

from penstock.errors import InvalidFileError, UnsupportedError
from penstock.models.checkpoint import read_small_file

__all__ = ["read_yaml"]

_MAX_BYTES: Final = 1 << 20


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a file holds.

    Only plain values are made of it, never objects.  InvalidFileError for what is no YAML, no mapping, or has a key
    twice; UnsupportedError without PyYAML.
    """
    data = read_small_file(path, _MAX_BYTES)
    try:
        import yaml
    except ModuleNotFoundError:
        raise UnsupportedError(f"{path}: reading YAML needs PyYAML: pip install pyyaml") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """The safe loader, which takes the last of equal keys, made to refuse them."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            seen = set()
            for key, _ in node.value:
                name = key.value if isinstance(key, yaml.ScalarNode) else str(key)
                if name in seen:
                    line = key.start_mark.line + 1
                    raise InvalidFileError(f"{path}: line {line}: {name!r:.60} is there twice")
                seen.add(name)
            found: dict[Hashable, Any] = super().construct_mapping(node, deep)
            return found

    try:
        values = yaml.load(data, Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise InvalidFileError(f"{path}: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InvalidFileError(f"{path}: expected a mapping of names to values, found {type(values).__name__}")
    return values
