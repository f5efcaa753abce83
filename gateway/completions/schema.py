"""The body of ``POST /v1/completions``: bytes in, a checked `CompletionRequest` or an `ApiError` out."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.chat_request import AnswerAsked, SamplingAsked
from gateway.completions.parameters import COMPLETIONS, MAX_TOKENS, PROMPTS_MAX, STREAM_OPTIONS_REFUSED
from gateway.openai_errors import invalid_value
from gateway.openai_fields import Body, read_boolean, read_integer, read_object
from gateway.openai_schema import decode_object, read_model
from gateway.parameter_table import refuse_unless_neutral
from gateway.sampling_schema import CHOICES_MAX, TOP_LOGPROBS_MAX, read_answer, read_sampling
from gateway.text_input import TextInput, read_text_inputs

CALL_CHOICES_MAX = 1024
"""Generated for all prompts of a call: each is held until the call ends."""
PRIORITY_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """One call.

    Args:
        model: Under which name.
        prompts: To be continued.
        sampling: How tokens are drawn.
        answer: What each choice is like; `n` are shown for each prompt, and `max_tokens` is a number, perhaps 0.
        best_of: Choices that are generated for each prompt; at least `n`.
        echo: Begin each choice with its prompt.
        add_special_tokens: Add what the tokenizer adds to any text.
        stream: Whether to stream.
        include_usage: A stream ends with its usage.
        continuous_usage: Every stream chunk has the usage so far.
        priority: Of admission: lower goes first.
        unknown: Names of fields that are no parameter of ours; ignored.
    """

    model: str
    prompts: tuple[TextInput, ...]
    sampling: SamplingAsked
    answer: AnswerAsked
    best_of: int
    echo: bool
    add_special_tokens: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    unknown: tuple[str, ...]


def read_completion_request(data: bytes) -> CompletionRequest:
    """Decode and check a body.

    Raises:
        ApiError: 400 that names the parameter at fault.
    """
    body = decode_object(data)
    model = read_model(body)
    prompts = read_text_inputs(body.get("prompt"), "prompt", items_max=PROMPTS_MAX)
    unknown = COMPLETIONS.check(body)
    stream = read_boolean(body, "stream")
    answer = _read_answer(body)
    options = _read_stream_options(body, stream=stream)
    return CompletionRequest(
        model=model,
        prompts=prompts,
        sampling=read_sampling(body),
        answer=answer,
        best_of=_read_best_of(body, answer.n, prompts=len(prompts), stream=stream),
        echo=read_boolean(body, "echo"),
        add_special_tokens=read_boolean(body, "add_special_tokens", default=True),
        stream=stream,
        include_usage=read_boolean(options, "include_usage", path="stream_options.include_usage"),
        continuous_usage=read_boolean(options, "continuous_usage_stats", path="stream_options.continuous_usage_stats"),
        priority=read_integer(body, "priority", -PRIORITY_MAX, PRIORITY_MAX) or 0,
        unknown=unknown,
    )


def _read_answer(body: Body) -> AnswerAsked:
    """What choices are like, with this endpoint's own limit of their length."""
    body = {**body, "max_tokens": MAX_TOKENS} if body.get("max_tokens") is None else body
    logprobs = None if body.get("logprobs") is False else read_integer(body, "logprobs", 0, TOP_LOGPROBS_MAX)
    return read_answer(body, logprobs=logprobs, limit_names=("max_tokens",), limit_min=0)


def _read_best_of(body: Body, n: int, *, prompts: int, stream: bool) -> int:
    best_of = read_integer(body, "best_of", 1, CHOICES_MAX) or n
    if best_of < n:
        raise invalid_value("best_of", f"expected at least n, which is {n}, got {best_of}")
    if best_of > n and stream:
        raise invalid_value("best_of", "the best of several can only be told at the end, so not with stream")
    if best_of * prompts > CALL_CHOICES_MAX:
        numbers = f"{prompts} prompts with {best_of} each"
        raise invalid_value("n", f"at most {CALL_CHOICES_MAX} choices are generated in one call, got {numbers}")
    return best_of


def _read_stream_options(body: Body, *, stream: bool) -> Body:
    options = read_object(body, "stream_options")
    if options is None:
        return {}
    if not stream:
        raise invalid_value("stream_options", "only allowed when stream is true")
    for name, refused in STREAM_OPTIONS_REFUSED.items():
        refuse_unless_neutral(f"stream_options.{name}", options.get(name), refused)
    return options
