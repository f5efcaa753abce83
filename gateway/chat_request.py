"""What a caller asks of a chat, whatever endpoint the call came in by. None leaves a choice to the server.

`gateway.openai_schema` reads chat completions into this; the other dialects read theirs into the same, so
that one place (`gateway.turn`) makes a generation and its answers of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.openai_messages import ChatMessage

ToolMode = Literal["none", "auto", "required"]
FormatKind = Literal["text", "json_object", "json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingAsked:
    """How tokens are to be drawn; the fields are those of `shared.messages.SamplingParams`.

    Args:
        ignore_eos: Only `stop_token_ids` and the limit end an answer.
        stop_token_ids: End an answer, beside the model's own.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerAsked:
    """What answers are to be like.

    Args:
        n: How many choices.
        max_tokens: Of each.
        max_tokens_param: The name under which that came, for messages.
        max_tokens_is_bound: It is an upper bound: where the context has less room, the answer is that much shorter.
        stop: Strings that end an answer.
        include_stop: Whether a stop string is shown.
        logprobs: How many alternatives to each token; None for no log-probabilities at all.
        skip_special_tokens: False shows them.
        token_ids: Return ids too.
    """

    n: int = 1
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    max_tokens_is_bound: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    token_ids: bool = False

    @property
    def tokens_that_must_fit(self) -> int | None:
        """Tokens for which the context must have room beside the prompt; None for at least one."""
        return None if self.max_tokens_is_bound else self.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call.

    Args:
        name: Its name.
        parameters: JSON schema of its arguments; empty where it takes none.
        strict: Arguments must follow the schema.
        definition: As the caller gave it, for the chat template.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool
    definition: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsAsked:
    """Which functions may, or must, be called.

    Args:
        tools: All that the model is told of.
        mode: Whether it must call one.
        allowed: Names of those that it may call; empty allows all.
        is_named: The caller named the one function to call, so a call is no news (`finish_reason` is `stop`).
        parallel: Whether it may call several at once.
    """

    tools: tuple[Tool, ...] = ()
    mode: ToolMode = "none"
    allowed: tuple[str, ...] = ()
    is_named: bool = False
    parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatAsked:
    """What the content must match.

    Args:
        kind: `text` is anything.
        value: The schema, the expression, the choices, or the grammar (Lark's or llama.cpp's notation).
        strict: False lets a schema's keywords go unenforced that cannot be; otherwise they are refused.
        param: The name under which it came, for messages.
    """

    kind: FormatKind = "text"
    value: Any = None
    strict: bool = True
    param: str = "response_format"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateAsked:
    """How messages become a prompt.

    Args:
        kwargs: Variables of the chat template.
        add_generation_prompt: Open the assistant's turn at the end.
        continue_final_message: Leave the last message open instead, for the model to continue.
        effort: Of reasoning, where the template has a variable for it; `kwargs` win over it.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    effort: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One call.

    Args:
        model: Under which name.
        messages: As `read_messages` makes them.
        stream: Whether to stream.
        include_usage: A stream ends with its usage.
        continuous_usage: Every stream chunk has the usage so far.
        service_tier: As given; echoed as the one there is.
        priority: Of admission: lower goes first.
        unknown: Names of fields that are no parameter of ours; ignored.
    """

    model: str
    messages: list[ChatMessage]
    sampling: SamplingAsked = field(default_factory=SamplingAsked)
    answer: AnswerAsked = field(default_factory=AnswerAsked)
    tools: ToolsAsked = field(default_factory=ToolsAsked)
    format: FormatAsked = field(default_factory=FormatAsked)
    template: TemplateAsked = field(default_factory=TemplateAsked)
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    service_tier: str | None = None
    priority: int = 0
    unknown: tuple[str, ...] = ()
