"""Every parameter of a chat completion that this server knows, and what it does with it.

A parameter is honoured, accepted because ignoring it changes nothing in the answer, or refused with a 400
that names it. A refused parameter still passes when its value is the neutral one: null, or what means
"leave it as it is" (``n: 1``, ``logprobs: false``, ``tools: []``), because many clients always send those.
docs/api.md is written from these tables.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gateway.openai_errors import invalid_type, invalid_value, unsupported

METADATA_PAIRS_MAX = 16
METADATA_KEY_CHARS_MAX = 64
METADATA_VALUE_CHARS_MAX = 512


@dataclass(frozen=True, slots=True)
class Harmless:
    """Accepted and ignored: it changes nothing that the answer shows.

    Args:
        expected: The JSON types it may have, as `invalid_type` names them.
        types: The same as Python types.
        note: Why ignoring it is right.
    """

    expected: str
    types: tuple[type, ...]
    note: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Refused unless neutral.

    Args:
        reason: Completes "… is not supported by this server:".
        neutral: Values that ask for nothing, beside null.
    """

    reason: str
    neutral: tuple[object, ...] = field(default=())


HONOURED: dict[str, str] = {
    "model": "Required. The served name, or `default`.",
    "messages": "Required. Roles `system`, `developer`, `user`, `assistant`, `tool`; content a string or text parts.",
    "temperature": "0 to 2; 0 is greedy. Default: the model's generation config, else 1.",
    "top_p": "Above 0, at most 1. Default: the model's generation config, else 1.",
    "seed": "64-bit integer. The same seed and parameters give the same tokens.",
    "stop": "A string or up to 16 non-empty strings of up to 500 characters, found across token borders.",
    "max_completion_tokens": "At least 1. Prompt and answer must fit the context. Default: to its end.",
    "max_tokens": "The older name of `max_completion_tokens`, which wins when both are given.",
    "stream": "Server-sent events.",
    "stream_options": "`include_usage`: a usage chunk at the end. Only with `stream: true`.",
}

_STRING = ("a string", (str,))
_BOOLEAN = ("a boolean", (bool,))
_OBJECT = ("an object", (dict,))
_NO_STORE = "nothing is stored"
_NO_CACHE_CONTROL = "no prompt is kept between calls, so there is nothing to control"

HARMLESS: dict[str, Harmless] = {
    "user": Harmless(*_STRING, "identifies the caller to the provider"),
    "safety_identifier": Harmless(*_STRING, "identifies the caller to the provider"),
    "metadata": Harmless(*_OBJECT, f"{_NO_STORE}; checked: up to 16 pairs of strings"),
    "store": Harmless(*_BOOLEAN, _NO_STORE),
    "service_tier": Harmless(*_STRING, "there is one tier"),
    "verbosity": Harmless(*_STRING, "a hint to models that were trained for it"),
    "prompt_cache_key": Harmless(*_STRING, _NO_CACHE_CONTROL),
    "prompt_cache_options": Harmless(*_OBJECT, _NO_CACHE_CONTROL),
    "prompt_cache_retention": Harmless(*_STRING, _NO_CACHE_CONTROL),
    "cache_salt": Harmless(*_STRING, _NO_CACHE_CONTROL),
    "cache_prompt": Harmless(*_BOOLEAN, _NO_CACHE_CONTROL),
    "parallel_tool_calls": Harmless(*_BOOLEAN, "there are no tools to call"),
    "request_id": Harmless(*_STRING, "send an `x-request-id` header to choose the id"),
}

_LATER = "not in this version"
_GRAMMAR = "answers cannot be constrained in this version"
_TOOLS = "tool calling is not in this version"
_TEXT_ONLY = "this server reads and writes text only"
_SAMPLER = "the sampler does not know it in this version"
_TEMPLATE = "the chat template's own settings are used"
_TOKENS = "only tokens of the model's own choice are generated, and special tokens are never shown"
_REASONING = "the model's reasoning cannot be steered in this version"
_ENDPOINT = "it does not belong to this endpoint"

REFUSED: dict[str, Refused] = {
    # the API's own
    "n": Refused("one choice is generated in this version", (1,)),
    "logprobs": Refused(_LATER, (False,)),
    "top_logprobs": Refused(_LATER, (0,)),
    "logit_bias": Refused(_SAMPLER, ({},)),
    "frequency_penalty": Refused(_SAMPLER, (0,)),
    "presence_penalty": Refused(_SAMPLER, (0,)),
    "response_format": Refused(_GRAMMAR, ({"type": "text"},)),
    "tools": Refused(_TOOLS, ([],)),
    "tool_choice": Refused(_TOOLS, ("none", "auto")),
    "functions": Refused(_TOOLS, ([],)),
    "function_call": Refused(_TOOLS, ("none", "auto")),
    "audio": Refused(_TEXT_ONLY),
    "modalities": Refused(_TEXT_ONLY, (["text"],)),
    "reasoning_effort": Refused(_REASONING),
    "prediction": Refused(_LATER),
    "web_search_options": Refused("this server does not search the web"),
    "moderation": Refused("this server does not moderate"),
    # vLLM, sglang, llama.cpp, Ollama, OpenRouter: sampling
    "top_k": Refused(_SAMPLER, (0, -1)),
    "min_p": Refused(_SAMPLER, (0,)),
    "typical_p": Refused(_SAMPLER, (1,)),
    "top_a": Refused(_SAMPLER, (0,)),
    "top_n_sigma": Refused(_SAMPLER, (0, -1)),
    "tfs_z": Refused(_SAMPLER, (1,)),
    "xtc_probability": Refused(_SAMPLER, (0,)),
    "dry_multiplier": Refused(_SAMPLER, (0,)),
    "dynatemp_range": Refused(_SAMPLER, (0,)),
    "mirostat": Refused(_SAMPLER, (0,)),
    "repetition_penalty": Refused(_SAMPLER, (1,)),
    "repeat_penalty": Refused(_SAMPLER, (1,)),
    "no_repeat_ngram_size": Refused(_SAMPLER, (0,)),
    "length_penalty": Refused(_SAMPLER, (1,)),
    "use_beam_search": Refused(_SAMPLER, (False,)),
    "best_of": Refused("one choice is generated in this version", (1,)),
    "samplers": Refused(_SAMPLER),
    "logits_processors": Refused(_SAMPLER, ([],)),
    "options": Refused("send sampling parameters at the top level", ({},)),
    # which tokens, and where the answer ends
    "min_tokens": Refused(_TOKENS, (0,)),
    "n_predict": Refused("use max_completion_tokens", (-1,)),
    "ignore_eos": Refused(_TOKENS, (False,)),
    "stop_token_ids": Refused(_TOKENS, ([],)),
    "stop_regex": Refused("use stop", ("", [])),
    "include_stop_str_in_output": Refused("a stop string is never part of the answer", (False,)),
    "no_stop_trim": Refused("a stop string is never part of the answer", (False,)),
    "skip_special_tokens": Refused(_TOKENS, (True,)),
    "spaces_between_special_tokens": Refused(_TOKENS, (True, False)),
    "bad_words": Refused(_TOKENS, ([],)),
    "allowed_token_ids": Refused(_TOKENS),
    # constrained answers
    "structured_outputs": Refused(_GRAMMAR),
    "guided_json": Refused(_GRAMMAR),
    "guided_regex": Refused(_GRAMMAR),
    "guided_choice": Refused(_GRAMMAR),
    "guided_grammar": Refused(_GRAMMAR),
    "guided_json_object": Refused(_GRAMMAR, (False,)),
    "structural_tag": Refused(_GRAMMAR),
    "json_schema": Refused(_GRAMMAR, ({},)),
    "grammar": Refused(_GRAMMAR, ("",)),
    "regex": Refused(_GRAMMAR, ("",)),
    "ebnf": Refused(_GRAMMAR, ("",)),
    "format": Refused(_GRAMMAR, ("",)),
    # the prompt
    "add_generation_prompt": Refused(_TEMPLATE, (True,)),
    "continue_final_message": Refused(_TEMPLATE, (False,)),
    "add_special_tokens": Refused(_TEMPLATE, (False,)),
    "chat_template": Refused(_TEMPLATE),
    "chat_template_kwargs": Refused(_TEMPLATE, ({},)),
    "documents": Refused(_TEMPLATE, ([],)),
    "echo": Refused(_LATER, (False,)),
    "truncate_prompt_tokens": Refused("a prompt is never shortened"),
    "mm_processor_kwargs": Refused(_TEXT_ONLY, ({},)),
    # reasoning
    "reasoning": Refused(_REASONING),
    "thinking": Refused(_REASONING),
    "think": Refused(_REASONING),
    "enable_thinking": Refused(_REASONING),
    "include_reasoning": Refused(_REASONING, (True,)),
    # what the response would carry
    "prompt_logprobs": Refused(_LATER, (0, False)),
    "n_probs": Refused(_LATER, (0,)),
    "return_token_ids": Refused(_LATER, (False,)),
    "return_tokens_as_token_ids": Refused(_LATER, (False,)),
    "return_hidden_states": Refused(_LATER, (False,)),
    "timings_per_token": Refused(_LATER, (False,)),
    # scheduling, adapters, other endpoints
    "priority": Refused("all calls wait in one queue", (0,)),
    "kv_transfer_params": Refused("the mesh moves its own caches"),
    "lora_path": Refused("there are no adapters"),
    "models": Refused("this server serves one model", ([],)),
    "prompt": Refused(_ENDPOINT),
    "suffix": Refused(_ENDPOINT),
    "input": Refused(_ENDPOINT),
}

STREAM_OPTIONS_REFUSED: dict[str, Refused] = {
    "include_obfuscation": Refused("stream chunks are not padded", (False,)),
    "continuous_usage_stats": Refused("usage is sent once, at the end", (False,)),
}


def check_parameters(body: Mapping[str, object]) -> tuple[str, ...]:
    """As `check_against`, for a chat completion."""
    return check_against(body, HONOURED, HARMLESS, REFUSED)


def check_against(
    body: Mapping[str, object],
    honoured: Collection[str],
    harmless: Mapping[str, Harmless],
    refused: Mapping[str, Refused],
) -> tuple[str, ...]:
    """Check what is not honoured, and return the names that are not known at all.

    Unknown names are accepted, as other servers do: they are some client's own and ask nothing of ours.

    Raises:
        ApiError: 400 for a refused parameter that is not neutral, or a harmless one of the wrong type.
    """
    unknown = []
    for name, value in body.items():
        if name in honoured:
            continue
        if name in refused:
            refuse_unless_neutral(name, value, refused[name])
        elif name in harmless:
            _check_harmless(name, value, harmless[name])
        else:
            unknown.append(name)
    return tuple(unknown)


def refuse_unless_neutral(name: str, value: object, refused: Refused) -> None:
    """Let null and neutral values pass.

    Raises:
        ApiError: 400 that names the parameter.
    """
    if value is not None and not any(_same(value, neutral) for neutral in refused.neutral):
        raise unsupported(name, refused.reason)


def _same(value: object, neutral: object) -> bool:
    """Equality that does not take ``false`` for 0, as Python's does; 0.0 is 0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _check_harmless(name: str, value: object, harmless: Harmless) -> None:
    if value is not None and type(value) not in harmless.types:
        raise invalid_type(name, harmless.expected, value)
    if name == "metadata" and isinstance(value, dict):
        _check_metadata(value)


def _check_metadata(metadata: Mapping[str, object]) -> None:
    if len(metadata) > METADATA_PAIRS_MAX:
        raise invalid_value("metadata", f"at most {METADATA_PAIRS_MAX} pairs")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise invalid_type(f"metadata.{key[:METADATA_KEY_CHARS_MAX]}", "a string", value)
        if len(key) > METADATA_KEY_CHARS_MAX or len(value) > METADATA_VALUE_CHARS_MAX:
            limits = f"keys of at most {METADATA_KEY_CHARS_MAX} characters, values of {METADATA_VALUE_CHARS_MAX}"
            raise invalid_value("metadata", limits)
