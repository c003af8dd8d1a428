"""What a worker is told at its start: one line of JSON on its standard input, which stays open while it may live."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.engine.options import EngineOptions
from penstock.errors import InvalidArgumentError
from penstock.runtime.program import WEIGHTS, ProgramLimits
from penstock.runtime.verify import check_verify

__all__ = ["ModelOptions", "WorkerConfig"]

MAX_WAITING: Final = 256
"""Requests that may wait in a worker beyond the places of its step, unless told."""


@dataclass(frozen=True)
class ModelOptions:
    """How a model is opened and run; the fields are those of ``LLM``.

    ``max_waiting`` of ``engine`` bounds its queue.  ``weights``: "mmap", "huge", or "auto", which copies them into huge
    pages where twice their size is to spare beside the plan.
    """

    scheme: str | None = None
    threads: int = 0
    weights: str = "auto"
    limits: ProgramLimits = field(default_factory=ProgramLimits)
    engine: EngineOptions = field(default_factory=lambda: EngineOptions(max_waiting=MAX_WAITING))
    use_cache: bool = True
    verify: str = "once"


@dataclass(frozen=True)
class WorkerConfig:
    """``address`` of the primary as gRPC has it ("unix:/path", "host:port"); ``token`` proves that the worker belongs
    to it; ``name`` is the model's, ``path`` its file, ``version`` counts the weights under that name.
    ``reserved_bytes`` of the memory that looks free belong to other workers.  ``verify``: when this worker verifies
    the checksums of its bundle.
    """

    address: str
    token: str
    name: str
    path: str
    version: int = 1
    verify: str = "once"
    reserved_bytes: int = 0
    options: ModelOptions = field(default_factory=ModelOptions)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> WorkerConfig:
        """The config again; InvalidArgumentError for anything else."""
        try:
            fields: dict[str, Any] = json.loads(text)
            options = fields.pop("options")
            limits, engine = ProgramLimits(**options.pop("limits")), EngineOptions(**options.pop("engine"))
            if options["weights"] not in ("auto", *WEIGHTS):
                raise ValueError("weights must be auto, mmap or huge")
            check_verify(fields["verify"])
            check_verify(options["verify"])
            return WorkerConfig(**fields, options=ModelOptions(**options, limits=limits, engine=engine))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidArgumentError(f"a worker's configuration must be one line of JSON: {error}") from error
