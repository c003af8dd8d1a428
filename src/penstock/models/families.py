"""The families (values of model_type) that Penstock has a network for, found without importing PyTorch."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["built_in_families"]

# A file of this folder defines a network if it defines or re-exports a class Network.
_DEFINES_NETWORK: Final = re.compile(r"^(class Network\(|from penstock\.models\.\w+ import Network$)", re.MULTILINE)


@cache
def built_in_families() -> tuple[str, ...]:
    """Return the names of the files of this folder that define a network, sorted."""
    return tuple(
        sorted(path.stem for path in Path(__file__).parent.glob("*.py") if _DEFINES_NETWORK.search(path.read_text()))
    )
