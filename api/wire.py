"""The types of /v1 on the wire: what requests are parsed with, and what the OpenAPI document is made of.

The chat request's standard fields are checked for their types here and then sent on as the caller
wrote them, nested extras included; unknown top-level fields are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Count = Annotated[int, Meta(ge=0)]


class ImageUrl(Struct):
    """An image by https address or data URL."""

    url: str
    detail: str | None = None


class InputAudio(Struct):
    """Recorded sound, base64."""

    data: str
    format: str


class FileInput(Struct):
    """A file by id or as a data URL."""

    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None


class ContentPart(Struct):
    """One part of a message's content; which field counts is said by `type`."""

    type: Literal["text", "refusal", "image_url", "input_audio", "file"]
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None
    input_audio: InputAudio | None = None
    file: FileInput | None = None


class CalledFunction(Struct):
    """The function a model called, its arguments as a JSON string."""

    name: str
    arguments: str = ""


class ToolCall(Struct):
    """A call the assistant made in an earlier turn."""

    id: str
    type: str = "function"
    function: CalledFunction | None = None
    custom: dict[str, Any] | None = None


class ChatMessage(Struct):
    """One turn of the conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None


class StreamOptions(Struct):
    """What a stream carries besides the text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ToolDefinition(Struct):
    """A tool the model may call."""

    type: str
    function: dict[str, Any] | None = None
    custom: dict[str, Any] | None = None


class ResponseFormat(Struct):
    """The form the answer is to take."""

    type: str
    json_schema: dict[str, Any] | None = None


Name = Annotated[str, Meta(min_length=1, max_length=256)]
TokenLimit = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Choices = Annotated[int, Meta(ge=1, le=128)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class ChatRequest(Struct):
    """A chat request in the OpenAI format."""

    model: Name
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: TokenLimit | None = None
    max_tokens: TokenLimit | None = None
    n: Choices | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    moderation: dict[str, Any] | None = None


class PromptTokensDetails(Struct, omit_defaults=True):
    """Classes within the prompt tokens."""

    cached_tokens: Count = 0
    cache_write_tokens: Count = 0
    audio_tokens: Count | UnsetType = UNSET


class CompletionTokensDetails(Struct, omit_defaults=True):
    """Classes within the completion tokens."""

    reasoning_tokens: Count = 0
    audio_tokens: Count | UnsetType = UNSET


class ChatUsage(Struct):
    """What a call used, and what it cost its account: a decimal string of dollars."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    cost_usd: str
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    estimated: bool | UnsetType = UNSET


class AnswerMessage(Struct):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class Choice(Struct):
    """One of the answers asked for."""

    index: Count
    message: AnswerMessage
    finish_reason: str
    logprobs: dict[str, Any] | None = None


class ChatCompletion(Struct):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: ChatUsage


class ChunkChoice(Struct):
    """A piece of one of the answers."""

    index: Count
    delta: dict[str, Any]
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None


class ChatCompletionChunk(Struct):
    """One event of a streamed answer; the last one before [DONE] carries the usage when asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: ChatUsage | None | UnsetType = UNSET


class ModelPricing(Struct, omit_defaults=True):
    """Prices as decimal strings of dollars; absent ones do not apply."""

    input_per_million: str | None = None
    cached_input_per_million: str | None = None
    cache_write_per_million: str | None = None
    output_per_million: str | None = None
    per_image: str | None = None
    per_minute: str | None = None
    per_million_characters: str | None = None
    per_call: str | None = None


class Model(Struct):
    """An offer, in the form of the OpenAI model object with our additions."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    name: str
    surface: str
    context_length: int | None
    max_output_tokens: int
    modalities: list[str]
    capabilities: list[str]
    supported_parameters: list[str]
    pricing: ModelPricing


class ModelList(Struct):
    """All offers a key may use."""

    object: Literal["list"]
    data: list[Model]
    first_id: str
    last_id: str
    has_more: bool


class UsageRow(Struct):
    """One call: what it used, how long it took, how it ended and what it cost."""

    id: str
    object: Literal["usage"]
    request_id: str
    created_at: int
    finished_at: int | None
    state: Literal["open", "settled", "released", "expired", "refused"]
    status: int | None
    error_code: str | None
    surface: str
    path: str
    model: str
    key_id: str
    stream: bool
    prompt_tokens: Count
    cached_tokens: Count
    cache_write_tokens: Count
    completion_tokens: Count
    reasoning_tokens: Count
    total_tokens: Count
    latency_ms: int | None
    first_byte_ms: int | None
    finish_reason: str | None
    cost_usd: str
    cost_microusd: int
    charged_from: Literal["included", "wallet"] | None
    held_usd: str
    estimated: bool
    repeated: Count


class UsageList(Struct):
    """A page of calls, newest first."""

    object: Literal["list"]
    data: list[UsageRow]
    first_id: str
    last_id: str
    has_more: bool


class IncludedCalls(Struct):
    """Where the account stands with the free calls of the month."""

    limit: Count
    used: Count
    remaining: Count
    renews_at: int


class BalanceReport(Struct):
    """What the wallet holds: posted credit, what running calls have set aside, what is available."""

    object: Literal["balance"]
    currency: Literal["usd"]
    available_usd: str
    posted_usd: str
    held_usd: str
    available_microusd: int
    posted_microusd: int
    held_microusd: int
    plan: str
    included_calls: IncludedCalls


class FailedUpstream(Struct):
    """The provider that failed, and its HTTP status, null when it gave none."""

    provider: str | None
    status: int | None


class ErrorDetail(Struct):
    """What went wrong; `param` names the field at fault. The amounts stand with insufficient_credits only."""

    message: str
    type: str
    param: str | None
    code: str
    request_id: str
    needed_usd: str | UnsetType = UNSET
    available_usd: str | UnsetType = UNSET
    upstream: FailedUpstream | UnsetType = UNSET


class ErrorBody(Struct):
    """The one form of every error under /v1."""

    error: ErrorDetail
    request_id: str
