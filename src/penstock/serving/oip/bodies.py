"""The request and response bodies of the Open Inference Protocol over REST."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, UnsetType

from penstock.serving.oip.tensor_codec import MAX_DIMS, MAX_ID_CHARS, MAX_NAME_CHARS, MAX_TENSORS
from penstock.serving.request_decoding import refused
from penstock.serving.request_fields import MAX_TIMEOUT_S, Body, SamplingFields, TokenIds, extended
from penstock.tensors import DTYPES
from penstock.validation import MAX_TOKEN

__all__ = [
    "CONFIG_TYPES", "Done", "GenerateEvent", "GenerateRequest", "GenerateResponse", "InferParameters",
    "InferenceRequest", "InferenceResponse", "Microseconds", "ModelIndex", "ModelMetadata", "ModelReady",
    "RepositoryIndexRequest", "RepositoryLoadRequest", "RepositoryUnloadRequest", "ServerLive", "ServerMetadata",
    "ServerReady", "StatisticsResponse", "TritonModelConfig",
]  # fmt: skip

MAX_CONFIG_CHARS: Final = 1 << 16
CONFIG_TYPES: Final = {name: f"TYPE_{'STRING' if name == 'BYTES' else name}" for name in DTYPES}
"""The protocol's datatypes as a model's configuration names them."""

if TYPE_CHECKING:
    Datatype = str
    ConfigType = str
    _InferFields = SamplingFields
else:
    Datatype = Literal[tuple(DTYPES)]
    ConfigType = Literal[tuple(CONFIG_TYPES.values())]
    _InferFields = extended(
        "InferFields", SamplingFields, ("best_of",), {"echo logprobs": refused("use /v1/completions", [False])}
    )
Count = Annotated[int, Meta(ge=0)]
_Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Microseconds = Annotated[int, Meta(ge=1000, le=int(MAX_TIMEOUT_S * 1e6))]
_Id = Annotated[str, Meta(max_length=MAX_ID_CHARS)]
_Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
_NameOrNone = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
_Dims = Annotated[list[_Size], Meta(max_length=MAX_DIMS)]
_Shape = list[Annotated[int, Meta(ge=-1)]]
_Parameters = Annotated[
    dict[Annotated[str, Meta(pattern=r"^.{1,256}\Z")], str | bool | int | float],
    Meta(max_length=MAX_TENSORS),
]


class InferInputParameters(Body):
    """Parameters of an input."""

    binary_data_size: _Size | None = None


class InferInput(Body, kw_only=True):
    """An input tensor."""

    name: _Name
    datatype: Datatype
    shape: _Dims
    parameters: InferInputParameters | None = None
    data: Annotated[
        Any,
        Meta(
            description="The elements, nested or flat. Not with binary_data_size, which puts the bytes after the JSON."
        ),
    ] = None


class InferOutputParameters(Body):
    """Parameters of a requested output."""

    binary_data: bool | None = None


class InferRequestedOutput(Body, kw_only=True):
    """A requested output."""

    name: _Name
    parameters: InferOutputParameters | None = None


class InferenceRequest(Body, kw_only=True):
    """The body of ``infer``."""

    id: _Id | None = None
    model_name: Annotated[_NameOrNone | None, Meta(description="Same as in the path; some clients repeat it here.")] = (
        None
    )
    model_version: Annotated[_NameOrNone | None, Meta(description="Same as in the path.")] = None
    parameters: Annotated[
        _Parameters | None,
        Meta(description="binary_data_output: return all outputs as bytes. Other parameters are for the model."),
    ] = None
    inputs: Annotated[list[InferInput], Meta(min_length=1, max_length=MAX_TENSORS)]
    outputs: Annotated[list[InferRequestedOutput], Meta(max_length=MAX_TENSORS)] | None = None


class InferOutputSize(Body):
    """The size of an output that follows the JSON."""

    binary_data_size: Count


class InferOutput(Body):
    """An output tensor."""

    name: str
    datatype: Datatype
    shape: list[Count]
    parameters: InferOutputSize | UnsetType = UNSET
    data: list[Any] | UnsetType = UNSET


class InferenceResponse(Body):
    """The response of ``infer``."""

    model_name: str
    model_version: str
    outputs: list[InferOutput]
    id: str | UnsetType = UNSET
    parameters: _Parameters | UnsetType = UNSET


class InferParameters(_InferFields, kw_only=True):
    """The parameters of a request to a language model."""

    max_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_TOKEN)] | None, Meta(description="Maximum number of tokens to generate.")
    ] = None
    timeout: Annotated[
        Microseconds | None,
        Meta(description="Time limit in microseconds, after which the request ends with status 504."),
    ] = None
    stream: bool | None = None

    @property
    def timeout_s(self) -> float | None:
        """The time limit in seconds, if there is one."""
        return None if self.timeout is None else self.timeout / 1e6


class GenerateParameters(InferParameters):
    """The fields of GenerateRequest in ``parameters``."""


class GenerateRequest(InferParameters, kw_only=True):
    """The body of ``generate`` and ``generate_stream``.  Either ``text_input`` or ``input_ids`` is required."""

    id: _Id | None = None
    text_input: str | None = None
    input_ids: TokenIds | None = None
    parameters: Annotated[
        GenerateParameters | None,
        Meta(description="Accepts the same fields as the body. A field may be in only one of the two places."),
    ] = None


class GenerateEvent(Body):
    """An event of ``generate_stream``."""

    model_name: str
    model_version: str
    text_output: str
    finish_reason: str
    output_ids: list[Count]
    index: Count
    num_prompt_tokens: Count
    num_output_tokens: Count
    id: str | UnsetType = UNSET


class GenerateResponse(Body):
    """The response of ``generate``; with several answers each field is a list."""

    model_name: str
    model_version: str
    text_output: str | list[str]
    finish_reason: str | list[str]
    output_ids: list[Count | list[Count]]
    index: Count | list[Count]
    num_prompt_tokens: Count | list[Count]
    num_output_tokens: Count | list[Count]
    id: str | UnsetType = UNSET


class ServerLive(Body):
    """The response of ``health/live``."""

    live: bool


class ServerReady(Body):
    """The response of ``health/ready``."""

    ready: bool


class ModelReady(Body):
    """The readiness of a model."""

    name: str
    ready: bool


class ServerMetadata(Body):
    """The server's name, version and extensions."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(Body):
    """An input or output of a model; -1 stands for any size."""

    name: str
    datatype: Datatype
    shape: _Shape


class ModelMetadata(Body):
    """A model's inputs and outputs."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class StatisticDuration(Body):
    """A number of events and their total time in nanoseconds."""

    count: Count
    ns: Count


class InferStatistics(Body):
    """The times of a model's requests."""

    success: StatisticDuration
    fail: StatisticDuration
    queue: StatisticDuration
    compute_input: StatisticDuration
    compute_infer: StatisticDuration
    compute_output: StatisticDuration
    cache_hit: StatisticDuration
    cache_miss: StatisticDuration


class InferBatchStatistics(Body):
    """The times of a model's batches of one size."""

    batch_size: Count
    compute_input: StatisticDuration
    compute_infer: StatisticDuration
    compute_output: StatisticDuration


class ModelStatistics(Body):
    """The statistics of a model's version."""

    name: str
    version: str
    last_inference: Count
    inference_count: Count
    execution_count: Count
    inference_stats: InferStatistics
    batch_stats: list[InferBatchStatistics]


class StatisticsResponse(Body):
    """The statistics of models."""

    model_stats: list[ModelStatistics]


class ModelIndex(Body):
    """A version of a model or servable."""

    name: str
    version: str
    state: Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
    reason: str


class Done(Body):
    """The empty response of a change that was made."""


class RepositoryIndexRequest(Body):
    """The body of ``repository/index``."""

    ready: Annotated[bool | None, Meta(description="List only models that are ready.")] = None


class RepositoryLoadParameters(Body):
    """Parameters of a load."""

    config: Annotated[str, Meta(max_length=MAX_CONFIG_CHARS)] | None = None


class RepositoryLoadRequest(Body):
    """The body of a load."""

    parameters: Annotated[
        RepositoryLoadParameters | None, Meta(description="config: a string with a JSON object of settings.")
    ] = None


class RepositoryUnloadParameters(Body):
    """Parameters of an unload."""

    unload_dependents: bool | None = None


class RepositoryUnloadRequest(Body):
    """The body of an unload."""

    parameters: RepositoryUnloadParameters | None = None


class ModelInput(Body):
    """An input in a model's configuration."""

    name: str
    data_type: ConfigType
    dims: _Shape


class ModelOutput(ModelInput):
    """An output in a model's configuration."""


class ModelInstanceGroup(Body):
    """The processes that run a model."""

    name: str
    kind: Literal["KIND_CPU"]
    count: Count


class ModelQueuePolicy(Body):
    """The limits of a model's queue."""

    allow_timeout_override: bool | UnsetType = UNSET
    max_queue_size: Count | UnsetType = UNSET


class ModelDynamicBatching(Body):
    """The batching of requests."""

    preferred_batch_size: list[Count]
    max_queue_delay_microseconds: Count
    default_queue_policy: ModelQueuePolicy


class LatestVersions(Body):
    """Serve the latest versions."""

    num_versions: Count | UnsetType = UNSET


class AllVersions(Body):
    """Serve all versions."""


class SpecificVersions(Body):
    """Serve the listed versions."""

    versions: list[Count] | UnsetType = UNSET


class ModelVersionPolicy(Body):
    """The versions that are served: one of the fields is set."""

    latest: LatestVersions | UnsetType = UNSET
    all: AllVersions | UnsetType = UNSET
    specific: SpecificVersions | UnsetType = UNSET


class ModelTransactionPolicy(Body):
    """The transaction policy: ``decoupled`` allows several responses to a request."""

    decoupled: bool | UnsetType = UNSET


class TritonModelConfig(Body):
    """The configuration of a model in Triton's format."""

    name: str
    platform: str
    backend: str
    version_policy: ModelVersionPolicy
    max_batch_size: Annotated[
        Count,
        Meta(description="Maximum instances per request. If it is above 0, dims omit the leading batch dimension."),
    ]
    input: list[ModelInput]
    output: list[ModelOutput]
    instance_group: list[ModelInstanceGroup]
    dynamic_batching: Annotated[
        ModelDynamicBatching | UnsetType,
        Meta(description="Batching of the stage that statistics count; absent if it takes one instance at a time."),
    ] = UNSET
    model_transaction_policy: ModelTransactionPolicy | UnsetType = UNSET
