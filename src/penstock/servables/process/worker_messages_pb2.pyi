from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToStage(_message.Message):
    __slots__ = ("start", "batch")
    START_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    start: Start
    batch: Batch
    def __init__(self, start: _Optional[_Union[Start, _Mapping]] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ...) -> None: ...

class FromStage(_message.Message):
    __slots__ = ("ready", "failed", "result")
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ready: Ready
    failed: Failed
    result: Result
    def __init__(self, ready: _Optional[_Union[Ready, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("servable", "version", "folder", "file", "source", "model", "memory_limit_bytes", "cores")
    SERVABLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    servable: str
    version: str
    folder: str
    file: str
    source: bytes
    model: str
    memory_limit_bytes: int
    cores: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, servable: _Optional[str] = ..., version: _Optional[str] = ..., folder: _Optional[str] = ..., file: _Optional[str] = ..., source: _Optional[bytes] = ..., model: _Optional[str] = ..., memory_limit_bytes: _Optional[int] = ..., cores: _Optional[_Iterable[int]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: str
    def __init__(self, manifest: _Optional[str] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("text", "trace")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    text: str
    trace: str
    def __init__(self, text: _Optional[str] = ..., trace: _Optional[str] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("unit", "size", "counts", "inputs", "number")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    unit: int
    size: int
    counts: _containers.RepeatedScalarFieldContainer[int]
    inputs: _containers.RepeatedCompositeFieldContainer[Column]
    number: int
    def __init__(self, unit: _Optional[int] = ..., size: _Optional[int] = ..., counts: _Optional[_Iterable[int]] = ..., inputs: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., number: _Optional[int] = ...) -> None: ...

class Column(_message.Message):
    __slots__ = ("data", "sizes")
    DATA_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, data: _Optional[bytes] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("outputs", "failures", "excess_bytes", "took_ns", "number")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    EXCESS_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOOK_NS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[Column]
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    excess_bytes: int
    took_ns: int
    number: int
    def __init__(self, outputs: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., excess_bytes: _Optional[int] = ..., took_ns: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("part", "instance", "stage", "kind", "text", "trace")
    PART_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    part: int
    instance: int
    stage: str
    kind: str
    text: str
    trace: str
    def __init__(self, part: _Optional[int] = ..., instance: _Optional[int] = ..., stage: _Optional[str] = ..., kind: _Optional[str] = ..., text: _Optional[str] = ..., trace: _Optional[str] = ...) -> None: ...

class ToMachine(_message.Message):
    __slots__ = ("welcome", "refusal", "accepted", "start", "batch", "end", "process")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refusal: Refusal
    accepted: Accepted
    start: Start
    batch: Batch
    end: EndProcess
    process: int
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ..., end: _Optional[_Union[EndProcess, _Mapping]] = ..., process: _Optional[int] = ...) -> None: ...

class FromMachine(_message.Message):
    __slots__ = ("join", "offer", "leave", "ready", "failed", "result", "ended", "alive", "process")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    join: Join
    offer: Offer
    leave: Leave
    ready: Ready
    failed: Failed
    result: Result
    ended: Ended
    alive: Alive
    process: int
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., process: _Optional[int] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("protocol", "token")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    token: str
    def __init__(self, protocol: _Optional[int] = ..., token: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol",)
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    def __init__(self, protocol: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("text", "may_retry")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MAY_RETRY_FIELD_NUMBER: _ClassVar[int]
    text: str
    may_retry: bool
    def __init__(self, text: _Optional[str] = ..., may_retry: bool = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("machine", "num_processes", "versions")
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    NUM_PROCESSES_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    machine: str
    num_processes: int
    versions: _containers.RepeatedCompositeFieldContainer[OfferedVersion]
    def __init__(self, machine: _Optional[str] = ..., num_processes: _Optional[int] = ..., versions: _Optional[_Iterable[_Union[OfferedVersion, _Mapping]]] = ...) -> None: ...

class OfferedVersion(_message.Message):
    __slots__ = ("servable", "version", "digest")
    SERVABLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    servable: str
    version: str
    digest: bytes
    def __init__(self, servable: _Optional[str] = ..., version: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Leave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Alive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndProcess(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ended(_message.Message):
    __slots__ = ("cause", "why", "has_begun", "stage", "instance")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    HAS_BEGUN_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    cause: str
    why: str
    has_begun: bool
    stage: int
    instance: int
    def __init__(self, cause: _Optional[str] = ..., why: _Optional[str] = ..., has_begun: bool = ..., stage: _Optional[int] = ..., instance: _Optional[int] = ...) -> None: ...
