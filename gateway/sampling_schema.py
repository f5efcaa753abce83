"""How tokens are to be drawn and where answers end, read from a body of any endpoint.

The names and bounds are OpenAI's where it has the parameter, else vLLM's. Whether a token id is one of the model's
vocabulary is for `gateway.turn_sampling` to say, which knows the model.
"""

from __future__ import annotations

from gateway.chat_request import AnswerAsked, SamplingAsked
from gateway.openai_errors import invalid_type, invalid_value, quoted
from gateway.openai_fields import (
    Body,
    check_integer,
    read_boolean,
    read_integer,
    read_list,
    read_number,
    read_positive_number,
)
from shared.fields import LIST_ITEMS_MAX
from shared.messages import PENALTY_MAX

TEMPERATURE_MAX = 2.0
ADDED_PENALTY_MAX = 2.0
"""Of `frequency_penalty` and `presence_penalty`, in either direction."""
BIAS_MAX = 100.0
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
TOKENS_MAX = 2**31 - 1
"""Of limits and ids: more than any context or vocabulary has."""
CHOICES_MAX = 128
"""OpenAI's; SDKs cannot read more."""
TOP_LOGPROBS_MAX = 20
STOPS_MAX = 16
STOP_CHARS_MAX = 500
"""Bounds the text that is held back, and the automaton that looks for it."""
STOP_IDS_MAX = 1024
"""With the model's own they stay far below what a message between machines may list."""
IDS_MAX = LIST_ITEMS_MAX
"""Ids that are allowed or biased; what a message between machines may list."""


def read_sampling(body: Body) -> SamplingAsked:
    """How tokens are to be drawn.

    Raises:
        ApiError: 400 that names the parameter at fault.
    """
    repetition = read_positive_number(body, "repetition_penalty", PENALTY_MAX)
    llama_repetition = read_positive_number(body, "repeat_penalty", PENALTY_MAX)
    return SamplingAsked(
        temperature=read_number(body, "temperature", 0.0, TEMPERATURE_MAX),
        top_p=read_positive_number(body, "top_p", 1.0, hint="; use temperature 0 for greedy answers"),
        top_k=_read_top_k(body),
        min_p=read_number(body, "min_p", 0.0, 1.0),
        seed=read_integer(body, "seed", SEED_MIN, SEED_MAX),
        frequency_penalty=read_number(body, "frequency_penalty", -ADDED_PENALTY_MAX, ADDED_PENALTY_MAX),
        presence_penalty=read_number(body, "presence_penalty", -ADDED_PENALTY_MAX, ADDED_PENALTY_MAX),
        repetition_penalty=llama_repetition if repetition is None else repetition,
        logit_bias=_read_logit_bias(body.get("logit_bias")),
        allowed_token_ids=_read_allowed(body),
        min_tokens=read_integer(body, "min_tokens", 0, TOKENS_MAX) or 0,
        ignore_eos=read_boolean(body, "ignore_eos"),
        stop_token_ids=_read_ids(body, "stop_token_ids", STOP_IDS_MAX),
    )


def read_answer(
    body: Body,
    *,
    logprobs: int | None = None,
    limit_names: tuple[str, ...] = ("max_completion_tokens", "max_tokens"),
    limit_min: int = 1,
) -> AnswerAsked:
    """What answers are to be like.

    Args:
        body: The request's.
        logprobs: As this endpoint spells it (`read_chat_logprobs`).
        limit_names: Parameters that limit the answer's length; of those given the first one counts.
        limit_min: The least that it may be.

    Raises:
        ApiError: 400 that names the parameter at fault.
    """
    limits = {name: read_integer(body, name, limit_min, TOKENS_MAX) for name in limit_names}
    given = [name for name, limit in limits.items() if limit is not None]
    limit_name = given[0] if given else limit_names[0]
    min_tokens = read_integer(body, "min_tokens", 0, TOKENS_MAX) or 0
    limit = limits[limit_name]
    if limit is not None and min_tokens > limit:
        raise invalid_value("min_tokens", f"expected at most {limit_name}, which is {limit}, got {min_tokens}")
    return AnswerAsked(
        n=read_integer(body, "n", 1, CHOICES_MAX) or 1,
        max_tokens=limit,
        max_tokens_param=limit_name,
        stop=read_stop(body.get("stop")),
        include_stop=read_boolean(body, "include_stop_str_in_output") or read_boolean(body, "no_stop_trim"),
        logprobs=logprobs,
        skip_special_tokens=read_boolean(body, "skip_special_tokens", default=True),
        token_ids=read_boolean(body, "return_token_ids"),
    )


def read_chat_logprobs(body: Body) -> int | None:
    """How many alternatives to each token are asked for; None for no log-probabilities at all.

    Raises:
        ApiError: 400, also for `top_logprobs` without `logprobs`.
    """
    asked = read_boolean(body, "logprobs")
    top = read_integer(body, "top_logprobs", 0, TOP_LOGPROBS_MAX)
    if top and not asked:
        raise invalid_value("top_logprobs", "only allowed when logprobs is true")
    return (top or 0) if asked else None


def read_stop(value: object, param: str = "stop") -> tuple[str, ...]:
    """Stop strings: one, several, or none.

    Raises:
        ApiError: 400, also for an empty one, which would end every answer before it began.
    """
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise invalid_type(param, "a string or an array of strings", value)
    if len(stops) > STOPS_MAX:
        raise invalid_value(param, f"at most {STOPS_MAX} stop strings, got {len(stops)}")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise invalid_type(f"{param}[{index}]", "a string", stop)
        if not 1 <= len(stop) <= STOP_CHARS_MAX:
            raise invalid_value(param, f"a stop string has 1 to {STOP_CHARS_MAX} characters, one has {len(stop)}")
    return tuple(dict.fromkeys(stops))


def _read_top_k(body: Body) -> int | None:
    """Both 0 and -1 mean all, as in llama.cpp and in vLLM."""
    top_k = read_integer(body, "top_k", -1, TOKENS_MAX)
    return 0 if top_k == -1 else top_k


def _read_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise invalid_type("logit_bias", "an object", value)
    if len(value) > IDS_MAX:
        raise invalid_value("logit_bias", f"at most {IDS_MAX} tokens, got {len(value)}")
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= len(str(TOKENS_MAX))):
            raise invalid_value("logit_bias", f"expected token ids as keys, got {quoted(key)}")
        path = f"logit_bias.{key}"
        amount = read_number({path: bias}, path, -BIAS_MAX, BIAS_MAX)
        if amount is None:
            raise invalid_type(path, "a number", bias)
        biases[int(key)] = amount
    return tuple(biases.items())


def _read_allowed(body: Body) -> tuple[int, ...]:
    if body.get("allowed_token_ids") == []:
        raise invalid_value("allowed_token_ids", "at least one id is required", code="empty_array")
    return _read_ids(body, "allowed_token_ids", IDS_MAX)


def _read_ids(body: Body, name: str, items_max: int) -> tuple[int, ...]:
    ids = read_list(body, name, items_max) or []
    read = (check_integer(f"{name}[{index}]", token_id, 0, TOKENS_MAX) for index, token_id in enumerate(ids))
    return tuple(dict.fromkeys(read))
