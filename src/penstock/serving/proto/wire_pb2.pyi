from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromWorker(_message.Message):
    __slots__ = ("join", "ready", "failed", "refused", "step", "heartbeat", "planned", "leave", "pages_offered", "pages_granted", "page_data", "page_stored", "pages_ended", "profiled")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    PAGES_OFFERED_FIELD_NUMBER: _ClassVar[int]
    PAGES_GRANTED_FIELD_NUMBER: _ClassVar[int]
    PAGE_DATA_FIELD_NUMBER: _ClassVar[int]
    PAGE_STORED_FIELD_NUMBER: _ClassVar[int]
    PAGES_ENDED_FIELD_NUMBER: _ClassVar[int]
    PROFILED_FIELD_NUMBER: _ClassVar[int]
    join: Join
    ready: Ready
    failed: Error
    refused: Refused
    step: Step
    heartbeat: Heartbeat
    planned: Planned
    leave: Leave
    pages_offered: PagesOffered
    pages_granted: PagesGranted
    page_data: PageData
    page_stored: PageStored
    pages_ended: PagesEnded
    profiled: Profiled
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., failed: _Optional[_Union[Error, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., planned: _Optional[_Union[Planned, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., pages_offered: _Optional[_Union[PagesOffered, _Mapping]] = ..., pages_granted: _Optional[_Union[PagesGranted, _Mapping]] = ..., page_data: _Optional[_Union[PageData, _Mapping]] = ..., page_stored: _Optional[_Union[PageStored, _Mapping]] = ..., pages_ended: _Optional[_Union[PagesEnded, _Mapping]] = ..., profiled: _Optional[_Union[Profiled, _Mapping]] = ...) -> None: ...

class ToWorker(_message.Message):
    __slots__ = ("submit", "score", "embed", "abort", "stop", "welcome", "ask_pages", "offer_pages", "grant_pages", "read_page", "page_data", "end_pages", "profile")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    EMBED_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ASK_PAGES_FIELD_NUMBER: _ClassVar[int]
    OFFER_PAGES_FIELD_NUMBER: _ClassVar[int]
    GRANT_PAGES_FIELD_NUMBER: _ClassVar[int]
    READ_PAGE_FIELD_NUMBER: _ClassVar[int]
    PAGE_DATA_FIELD_NUMBER: _ClassVar[int]
    END_PAGES_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    score: Score
    embed: Embed
    abort: Abort
    stop: Stop
    welcome: Welcome
    ask_pages: AskPages
    offer_pages: OfferPages
    grant_pages: GrantPages
    read_page: ReadPage
    page_data: PageData
    end_pages: EndPages
    profile: Profile
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., score: _Optional[_Union[Score, _Mapping]] = ..., embed: _Optional[_Union[Embed, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., ask_pages: _Optional[_Union[AskPages, _Mapping]] = ..., offer_pages: _Optional[_Union[OfferPages, _Mapping]] = ..., grant_pages: _Optional[_Union[GrantPages, _Mapping]] = ..., read_page: _Optional[_Union[ReadPage, _Mapping]] = ..., page_data: _Optional[_Union[PageData, _Mapping]] = ..., end_pages: _Optional[_Union[EndPages, _Mapping]] = ..., profile: _Optional[_Union[Profile, _Mapping]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("protocol", "token", "model", "pid", "role")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    token: str
    model: str
    pid: int
    role: str
    def __init__(self, protocol: _Optional[int] = ..., token: _Optional[str] = ..., model: _Optional[str] = ..., pid: _Optional[int] = ..., role: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "page_secret")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PAGE_SECRET_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    page_secret: bytes
    def __init__(self, protocol: _Optional[int] = ..., page_secret: _Optional[bytes] = ...) -> None: ...

class AskPages(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Planned(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: Plan
    def __init__(self, plan: _Optional[_Union[Plan, _Mapping]] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ready(_message.Message):
    __slots__ = ("card", "files", "plan", "max_open", "weights_id", "state_id", "copies_pages")
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    CARD_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    MAX_OPEN_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    COPIES_PAGES_FIELD_NUMBER: _ClassVar[int]
    card: Card
    files: _containers.ScalarMap[str, bytes]
    plan: Plan
    max_open: int
    weights_id: str
    state_id: str
    copies_pages: bool
    def __init__(self, card: _Optional[_Union[Card, _Mapping]] = ..., files: _Optional[_Mapping[str, bytes]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., max_open: _Optional[int] = ..., weights_id: _Optional[str] = ..., state_id: _Optional[str] = ..., copies_pages: bool = ...) -> None: ...

class Card(_message.Message):
    __slots__ = ("name", "created", "max_len", "vocab_size", "scheme", "network", "source", "version", "has_embeddings", "has_tokenizer", "has_chat_template", "tail")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HAS_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    created: int
    max_len: int
    vocab_size: int
    scheme: str
    network: str
    source: str
    version: int
    has_embeddings: bool
    has_tokenizer: bool
    has_chat_template: bool
    tail: str
    def __init__(self, name: _Optional[str] = ..., created: _Optional[int] = ..., max_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., scheme: _Optional[str] = ..., network: _Optional[str] = ..., source: _Optional[str] = ..., version: _Optional[int] = ..., has_embeddings: bool = ..., has_tokenizer: bool = ..., has_chat_template: bool = ..., tail: _Optional[str] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("total_bytes", "weight_bytes", "kv_bytes", "num_pages", "max_requests", "num_threads", "cpu_level", "load_s", "populate_s", "num_ranks")
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    CPU_LEVEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    POPULATE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    weight_bytes: int
    kv_bytes: int
    num_pages: int
    max_requests: int
    num_threads: int
    cpu_level: str
    load_s: float
    populate_s: float
    num_ranks: int
    def __init__(self, total_bytes: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., num_pages: _Optional[int] = ..., max_requests: _Optional[int] = ..., num_threads: _Optional[int] = ..., cpu_level: _Optional[str] = ..., load_s: _Optional[float] = ..., populate_s: _Optional[float] = ..., num_ranks: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("kind", "text", "retry_after_s", "param", "code")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    retry_after_s: float
    param: str
    code: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., param: _Optional[str] = ..., code: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("key", "error")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    key: int
    error: Error
    def __init__(self, key: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("iteration_age_s", "stats", "longest_iteration_s", "pages")
    ITERATION_AGE_S_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_ITERATION_S_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    iteration_age_s: float
    stats: Stats
    longest_iteration_s: float
    pages: PageReport
    def __init__(self, iteration_age_s: _Optional[float] = ..., stats: _Optional[_Union[Stats, _Mapping]] = ..., longest_iteration_s: _Optional[float] = ..., pages: _Optional[_Union[PageReport, _Mapping]] = ...) -> None: ...

class PageReport(_message.Message):
    __slots__ = ("number", "is_full", "gained", "dropped", "num_blank")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    IS_FULL_FIELD_NUMBER: _ClassVar[int]
    GAINED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLANK_FIELD_NUMBER: _ClassVar[int]
    number: int
    is_full: bool
    gained: bytes
    dropped: bytes
    num_blank: int
    def __init__(self, number: _Optional[int] = ..., is_full: bool = ..., gained: _Optional[bytes] = ..., dropped: _Optional[bytes] = ..., num_blank: _Optional[int] = ...) -> None: ...

class Stats(_message.Message):
    __slots__ = ("numbers", "counts")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Counts
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Counts, _Mapping]] = ...) -> None: ...
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.ScalarMap[str, float]
    counts: _containers.MessageMap[str, Counts]
    def __init__(self, numbers: _Optional[_Mapping[str, float]] = ..., counts: _Optional[_Mapping[str, Counts]] = ...) -> None: ...

class Counts(_message.Message):
    __slots__ = ("by_name",)
    class ByNameEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    BY_NAME_FIELD_NUMBER: _ClassVar[int]
    by_name: _containers.ScalarMap[str, int]
    def __init__(self, by_name: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("events", "pages")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[StepEvent]
    pages: PageReport
    def __init__(self, events: _Optional[_Iterable[_Union[StepEvent, _Mapping]]] = ..., pages: _Optional[_Union[PageReport, _Mapping]] = ...) -> None: ...

class StepEvent(_message.Message):
    __slots__ = ("key", "index", "text", "token_ids", "logprobs", "finish_reason", "started", "timings", "vector", "error", "is_last", "has_logprobs", "seed")
    class TimingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    HAS_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    key: int
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[Logprob]
    finish_reason: str
    started: Started
    timings: _containers.ScalarMap[str, float]
    vector: bytes
    error: Error
    is_last: bool
    has_logprobs: bool
    seed: int
    def __init__(self, key: _Optional[int] = ..., index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[Logprob, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., timings: _Optional[_Mapping[str, float]] = ..., vector: _Optional[bytes] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., is_last: bool = ..., has_logprobs: bool = ..., seed: _Optional[int] = ...) -> None: ...

class Logprob(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "top_ids", "top_logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("seed", "num_prompt_tokens", "num_cached_tokens", "has_prompt_logprobs", "prompt_logprobs", "queued_s", "prefill_s")
    SEED_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HAS_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    seed: int
    num_prompt_tokens: int
    num_cached_tokens: int
    has_prompt_logprobs: bool
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[Logprob]
    queued_s: float
    prefill_s: float
    def __init__(self, seed: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., has_prompt_logprobs: bool = ..., prompt_logprobs: _Optional[_Iterable[_Union[Logprob, _Mapping]]] = ..., queued_s: _Optional[float] = ..., prefill_s: _Optional[float] = ...) -> None: ...

class Options(_message.Message):
    __slots__ = ("priority", "deadline_s", "cache_salt", "truncate_prompt", "client")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    priority: int
    deadline_s: float
    cache_salt: str
    truncate_prompt: bool
    client: str
    def __init__(self, priority: _Optional[int] = ..., deadline_s: _Optional[float] = ..., cache_salt: _Optional[str] = ..., truncate_prompt: bool = ..., client: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "seed", "n", "best_of", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "logprobs", "prompt_logprobs", "echo", "json_schema", "json_object", "regex", "choice", "grammar", "skip_special_tokens", "no_repeat_ngram_size", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", "thinking_token_budget", "thinking_format", "kept_special_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_IDS_FIELD_NUMBER: _ClassVar[int]
    FORCED_BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FORCED_EOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    THINKING_TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    THINKING_FORMAT_FIELD_NUMBER: _ClassVar[int]
    KEPT_SPECIAL_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: TokenIds
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    seed: int
    n: int
    best_of: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    echo: bool
    json_schema: str
    json_object: bool
    regex: str
    choice: _containers.RepeatedScalarFieldContainer[str]
    grammar: str
    skip_special_tokens: bool
    no_repeat_ngram_size: int
    bad_words_ids: _containers.RepeatedCompositeFieldContainer[TokenIds]
    forced_bos_token_id: int
    forced_eos_token_id: int
    thinking_token_budget: int
    thinking_format: str
    kept_special_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., typical_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., bad_words: _Optional[_Iterable[str]] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ..., best_of: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., include_stop_str_in_output: bool = ..., ignore_eos: bool = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., echo: bool = ..., json_schema: _Optional[str] = ..., json_object: bool = ..., regex: _Optional[str] = ..., choice: _Optional[_Iterable[str]] = ..., grammar: _Optional[str] = ..., skip_special_tokens: bool = ..., no_repeat_ngram_size: _Optional[int] = ..., bad_words_ids: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., forced_bos_token_id: _Optional[int] = ..., forced_eos_token_id: _Optional[int] = ..., thinking_token_budget: _Optional[int] = ..., thinking_format: _Optional[str] = ..., kept_special_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("key", "request_id", "prompt_ids", "sampling", "options", "begun", "beams")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    key: int
    request_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    options: Options
    begun: _containers.RepeatedCompositeFieldContainer[BegunAnswer]
    beams: Beams
    def __init__(self, key: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., options: _Optional[_Union[Options, _Mapping]] = ..., begun: _Optional[_Iterable[_Union[BegunAnswer, _Mapping]]] = ..., beams: _Optional[_Union[Beams, _Mapping]] = ...) -> None: ...

class Beams(_message.Message):
    __slots__ = ("num_beams", "length_penalty", "early_stopping")
    NUM_BEAMS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    num_beams: int
    length_penalty: float
    early_stopping: str
    def __init__(self, num_beams: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[str] = ...) -> None: ...

class BegunAnswer(_message.Message):
    __slots__ = ("index", "token_ids", "num_chars", "has_ended")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHARS_FIELD_NUMBER: _ClassVar[int]
    HAS_ENDED_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_chars: int
    has_ended: bool
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_chars: _Optional[int] = ..., has_ended: bool = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("key", "request_id", "prompt_ids", "num_top", "options", "places")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    key: int
    request_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    num_top: int
    options: Options
    places: Places
    def __init__(self, key: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., num_top: _Optional[int] = ..., options: _Optional[_Union[Options, _Mapping]] = ..., places: _Optional[_Union[Places, _Mapping]] = ...) -> None: ...

class Places(_message.Message):
    __slots__ = ("positions", "token_ids")
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, positions: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Embed(_message.Message):
    __slots__ = ("key", "request_id", "prompt_ids", "pooling", "normalize", "options")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    key: int
    request_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    pooling: str
    normalize: bool
    options: Options
    def __init__(self, key: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., pooling: _Optional[str] = ..., normalize: bool = ..., options: _Optional[_Union[Options, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: int
    def __init__(self, key: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: Error
    def __init__(self, reason: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class OfferPages(_message.Message):
    __slots__ = ("transfer", "token_ids", "cache_salt")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    def __init__(self, transfer: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class PagesOffered(_message.Message):
    __slots__ = ("transfer", "num_pages")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    num_pages: int
    def __init__(self, transfer: _Optional[int] = ..., num_pages: _Optional[int] = ...) -> None: ...

class GrantPages(_message.Message):
    __slots__ = ("transfer", "token_ids", "cache_salt")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    def __init__(self, transfer: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class PagesGranted(_message.Message):
    __slots__ = ("transfer", "first", "num_parts")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    first: int
    num_parts: int
    def __init__(self, transfer: _Optional[int] = ..., first: _Optional[int] = ..., num_parts: _Optional[int] = ...) -> None: ...

class ReadPage(_message.Message):
    __slots__ = ("transfer", "first", "part")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    first: int
    part: int
    def __init__(self, transfer: _Optional[int] = ..., first: _Optional[int] = ..., part: _Optional[int] = ...) -> None: ...

class PageData(_message.Message):
    __slots__ = ("transfer", "part", "data")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    part: int
    data: bytes
    def __init__(self, transfer: _Optional[int] = ..., part: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PageStored(_message.Message):
    __slots__ = ("transfer", "part")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    part: int
    def __init__(self, transfer: _Optional[int] = ..., part: _Optional[int] = ...) -> None: ...

class EndPages(_message.Message):
    __slots__ = ("transfer", "num_parts", "checksum")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    num_parts: int
    checksum: bytes
    def __init__(self, transfer: _Optional[int] = ..., num_parts: _Optional[int] = ..., checksum: _Optional[bytes] = ...) -> None: ...

class PagesEnded(_message.Message):
    __slots__ = ("transfer", "num_parts", "checksum")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    num_parts: int
    checksum: bytes
    def __init__(self, transfer: _Optional[int] = ..., num_parts: _Optional[int] = ..., checksum: _Optional[bytes] = ...) -> None: ...

class Profile(_message.Message):
    __slots__ = ("steps", "seconds", "limits", "number")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    steps: int
    seconds: float
    limits: bool
    number: int
    def __init__(self, steps: _Optional[int] = ..., seconds: _Optional[float] = ..., limits: bool = ..., number: _Optional[int] = ...) -> None: ...

class Profiled(_message.Message):
    __slots__ = ("report", "error", "number")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    report: bytes
    error: Error
    number: int
    def __init__(self, report: _Optional[bytes] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...
