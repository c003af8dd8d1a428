"""Reads YAML configuration files: plain values only, no duplicate keys."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final

from penstock.checkpoint.side_files import read_small_file
from penstock.errors import InvalidFileError, UnsupportedError

__all__ = ["read_yaml"]

_MAX_BYTES: Final = 1 << 16
_MAX_NODES: Final = 1 << 16
"""Limit on the values of a file after aliases are replaced; a few lines of aliases can expand to billions."""


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Only plain values are created, never objects.  InvalidFileError if the file is not YAML, not a mapping, or has a
    duplicate key; UnsupportedError without PyYAML.
    """
    data = read_small_file(path, _MAX_BYTES)
    try:
        import yaml
    except ModuleNotFoundError:
        raise UnsupportedError(
            f"{path}: PyYAML is not installed. Run `pip install pyyaml`.", code="missing_package"
        ) from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """The safe loader, changed to refuse duplicate keys instead of keeping the last one."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            seen = set()
            for key, _ in node.value:
                name = key.value if isinstance(key, yaml.ScalarNode) else str(key)
                if name in seen:
                    line = key.start_mark.line + 1
                    raise InvalidFileError(f"{path}: line {line}: duplicate key {name!r:.60}", param=name[:60])
                seen.add(name)
            mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
            return mapping

    try:
        loader = Loader(data)
        loader.name = path.name  # what errors call the file
        root = loader.get_single_node()
        if root is not None:
            _check_expansion(root, path)
        values = None if root is None else loader.construct_document(root)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise InvalidFileError(f"{path}: {' '.join(str(error).split())[:300]}", param="path") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InvalidFileError(
            f"{path}: expected a mapping of names to values, got {type(values).__name__}", param="path"
        )
    return values


def _check_expansion(root: Any, path: Path) -> None:
    """Raise InvalidFileError if aliases expand to more than _MAX_NODES values, or if one contains itself."""
    sizes: dict[int, int] = {}
    pending = [root]
    while pending:
        node = pending[-1]
        items = node.value if isinstance(node.value, list) else []  # the value of a scalar is its text
        children = [child for item in items for child in (item if isinstance(item, tuple) else (item,))]
        if id(node) not in sizes:
            sizes[id(node)] = -1  # marks a node whose children are being counted
            pending += [child for child in children if id(child) not in sizes]
            continue
        pending.pop()
        if sizes[id(node)] >= 0:
            continue
        if any(sizes[id(child)] < 0 for child in children):
            raise InvalidFileError(f"{path}: line {node.start_mark.line + 1}: an alias contains itself", param="path")
        sizes[id(node)] = 1 + sum(sizes[id(child)] for child in children)
        if sizes[id(node)] > _MAX_NODES:
            raise InvalidFileError(
                f"{path}: expected at most {_MAX_NODES} values once aliases are replaced, got more", param="path"
            )
