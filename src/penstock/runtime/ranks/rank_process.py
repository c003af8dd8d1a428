"""The process of a rank other than 0: it opens its part of a bundle, and computes its part of each step of rank 0.

Settings come as a JSON object on stdin.  A JSON object on stdout says that the rank is ready, or why not.  Everything
else that the process or a library writes to descriptor 1 goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from penstock.core.rank_layout import RankLayout
from penstock.errors import UnavailableError
from penstock.processes.parent import die_with_parent
from penstock.runtime.program import ProgramLimits
from penstock.runtime.ranks.open_ranks import open_rank
from penstock.runtime.ranks.rank_group import RankComms, failure_of

__all__ = ["main"]


_messages = 1  # the descriptor to rank 0


def main() -> int:
    """Serve rank 0 until the group ends; return the exit status."""
    die_with_parent()
    _keep_stdout()
    rank, settings = int(sys.argv[1]), json.loads(sys.stdin.readline())
    if os.getppid() != settings["parent"]:
        return 1  # it ended before the kernel knew that this process should end with it
    layout = RankLayout(**settings["layout"])
    comms = RankComms.open(settings["comms"], rank, layout)
    try:
        program = open_rank(
            settings["parts"],
            comms,
            layout,
            settings["threads"],
            ProgramLimits(**settings["limits"]),
            lambda: _send(ready=True),
        )
        while True:
            program.core_program.follow()
    except UnavailableError as error:
        return 0 if error.code == "group_closed" else _fail(comms, rank, error)
    except Exception as error:
        return _fail(comms, rank, error)


def _fail(comms: RankComms, rank: int, error: Exception) -> int:
    comms.abort(f"rank {rank}: {error}")
    _send(**failure_of(rank, error))
    return 1


def _keep_stdout() -> None:
    """Let only messages reach rank 0; descriptor 1 becomes stderr."""
    global _messages
    _messages = os.dup(1)
    os.dup2(2, 1)


def _send(**message: Any) -> None:
    os.write(_messages, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    raise SystemExit(main())
