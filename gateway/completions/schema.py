"""The body of ``POST /v1/completions``: bytes in, a checked `CompletionRequest` or an `ApiError` out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.chat_request import AnswerAsked, SamplingAsked
from gateway.completions.parameters import HARMLESS, HONOURED, REFUSED
from gateway.json_fields import read_boolean, read_integer, read_model
from gateway.openai_errors import invalid_value
from gateway.openai_parameters import check_against
from gateway.openai_schema import TOKENS_MAX, decode_object, read_stream_options
from gateway.sampling_schema import read_answer, read_sampling
from gateway.text_input import TextInput, read_text_inputs

PROMPTS_MAX = 256
"""Of one call. Evaluations send tens; a longer list is better sent as several calls, which can be retried."""
CHOICES_MAX = 128
"""Generated for one prompt."""
CALL_CHOICES_MAX = 1024
"""Generated for all prompts of a call: each has a text of its own that is held until the call ends."""
MAX_TOKENS = 16
"""What is generated where nobody says how much; as OpenAI's."""
LOGPROBS_MAX = 20
"""Alternatives to a token, as for chats; OpenAI's own limit here is 5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """One call.

    Args:
        model: Under which name.
        prompts: To be continued.
        sampling: How tokens are drawn.
        answer: What each choice is like; its `n` are shown for each prompt, its `max_tokens` may be 0.
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
