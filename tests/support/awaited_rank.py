"""A rank that waits for others that do not come: ``python awaited_rank.py RANK`` prints what it said, as JSON."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any
from unittest.mock import patch


def main() -> None:
    from penstock.core import comm
    from penstock.errors import UnavailableError

    has_told, library = threading.Event(), comm.library()
    told: list[dict[str, Any]] = []

    class Core:
        """The core, which begins to wait only after the rank has said that it waits."""

        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

        def ps_shared_join(self, *arguments: Any) -> int:
            has_told.wait(300)
            return int(library.ps_shared_join(*arguments))

    def tell(event: str, message: str, level: int, **facts: Any) -> None:
        told.append({"event": event, "message": message, **facts})
        has_told.set()

    with patch.multiple(comm, library=Core, tell=tell):
        try:
            comm.JoinedComm(int(sys.argv[1]), 2, 4096, join_timeout_s=0.05, silent_s=0.0)
        except UnavailableError as error:
            print(json.dumps([told, str(error)]))


if __name__ == "__main__":
    main()
