"""The configuration of a worker: one line of JSON on its standard input, which stays open until the primary ends."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.core.rank_layout import RankLayout
from penstock.engine.options import EngineOptions
from penstock.errors import InvalidArgumentError
from penstock.runtime.program import WEIGHTS, ProgramLimits
from penstock.runtime.ranks.stage_server import StageServer
from penstock.runtime.verify import check_verify

__all__ = ["WorkerConfig", "WorkerModelOptions"]

MAX_WAITING: Final = 256
"""Default limit on the requests that wait in a worker beyond those that its step holds."""


@dataclass(frozen=True)
class WorkerModelOptions:
    """Options for opening and running a model; the fields are those of ``LLM``.

    ``engine.max_waiting`` limits its queue.  ``weights``: "mmap", "huge", or "auto".  "auto" copies weights into huge
    pages if the memory that the plan leaves is at least twice their size.  ``network`` applies to a folder only.
    ``threads``: of each rank, if ``tensor_parallel_size``, ``pipeline_parallel_size`` or ``context_parallel_size`` make
    the worker a group of several.  ``stage_server``: where the stages of other machines join, at a port that
    ``reserved_port`` keeps; its ``on_listen`` and ``on_join`` are not passed on.
    """

    scheme: str | None = None
    threads: int = 0
    weights: str = "auto"
    limits: ProgramLimits = field(default_factory=ProgramLimits)
    engine: EngineOptions = field(default_factory=lambda: EngineOptions(max_waiting=MAX_WAITING))
    use_cache: bool = True
    verify: str = "once"
    network: str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    stage_server: StageServer | None = None

    @property
    def layout(self) -> RankLayout:
        """The division of the model over ranks."""
        return RankLayout(self.tensor_parallel_size, self.pipeline_parallel_size, self.context_parallel_size)


@dataclass(frozen=True)
class WorkerConfig:
    """Configuration of one worker.

    ``address``: the primary's, "unix:PATH" or "HOST:PORT".  ``token``: proves that the worker belongs to the primary.
    ``name``, ``path``: the model's name and its file or folder.  ``version``: counts the weights under that name.
    ``verify``: when this worker verifies the checksums of its bundle.  ``ca``: the certificates in PEM that it trusts,
    for an address HOST:PORT.  ``reserved_bytes``: how much of the memory that looks free belongs to other workers.
    ``says_notes``: it prints the notes about its ranks, which no other worker of the service has printed.  ``role``:
    see ``worker_roles``.
    """

    address: str
    token: str
    name: str
    path: str
    version: int = 1
    verify: str = "once"
    reserved_bytes: int = 0
    options: WorkerModelOptions = field(default_factory=WorkerModelOptions)
    ca: str = ""
    says_notes: bool = True
    role: str = ""

    def to_json(self) -> str:
        """Return the configuration as one line of JSON."""
        fields = dataclasses.asdict(self)
        if (server := self.options.stage_server) is not None:
            paths = {name: os.fspath(getattr(server, name)) for name in ("certificate", "key")}
            fields["options"]["stage_server"] |= paths | {"on_listen": None, "on_join": None}
        return json.dumps(fields)

    @staticmethod
    def from_json(text: str) -> WorkerConfig:
        """Return the configuration in a line of JSON; InvalidArgumentError for any other text."""
        try:
            fields: dict[str, Any] = json.loads(text)
            options = fields.pop("options")
            limits, engine = ProgramLimits(**options.pop("limits")), EngineOptions(**options.pop("engine"))
            if options["weights"] not in ("auto", *WEIGHTS):
                raise ValueError("weights: expected auto, mmap or huge")
            check_verify(fields["verify"])
            check_verify(options["verify"])
            if (server := options.pop("stage_server")) is not None:
                server = StageServer(**server)
            model_options = WorkerModelOptions(**options, limits=limits, engine=engine, stage_server=server)
            _ = model_options.layout  # refuses impossible numbers of ranks
            return WorkerConfig(**fields, options=model_options)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidArgumentError(
                f"worker configuration: expected one line of JSON: {error}", param="configuration"
            ) from error
