"""Every parameter of ``POST /v1/responses`` that this server knows, and what it does with it."""

from __future__ import annotations

from gateway.parameter_table import Harmless, ParameterTable, Refused

INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_ENCRYPTED = "reasoning.encrypted_content"
"""Asked for by clients that keep conversations themselves. Our reasoning comes in plain, so it can go back as it is."""
INCLUDES = (INCLUDE_LOGPROBS, INCLUDE_ENCRYPTED)
VERBOSITIES = ("low", "medium", "high")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_AS_IN_CHAT = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "repeat_penalty",
    "logit_bias",
    "allowed_token_ids",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "no_stop_trim",
    "skip_special_tokens",
)
"""Not of OpenAI's Responses API, and read by the same code as for chat completions."""
_CALLER = "identifies the caller to the provider"
_CACHE = "no prompt is kept between calls, so there is nothing to control"
_BACKGROUND = "a response is made while its caller waits"
_CHAT = "it belongs to chat completions; here it is"

TABLE = ParameterTable(
    honoured={
        "model": "Required. The served name, or `default`.",
        "input": "Required. A string, or items: `message`, `function_call`, `function_call_output`, `reasoning`, "
        "`item_reference`.",
        "instructions": "A system message before everything else; not carried over by `previous_response_id`.",
        "previous_response_id": "Continues a stored response: its input and output come before `input`.",
        "store": "Whether to keep the response in memory for a while. Default true.",
        "stream": "Server-sent events.",
        "temperature": "0 to 2; 0 is greedy. Default: the model's generation config, else 1.",
        "top_p": "Above 0, at most 1. Default: the model's generation config, else 1.",
        "max_output_tokens": "At least 1, reasoning included. Default: to the end of the context.",
        "tools": "Of type `function`. `strict` is false unless given.",
        "tool_choice": "`none`, `auto`, `required`, a `function`, or `allowed_tools`.",
        "parallel_tool_calls": "Whether several functions may be called at once. Default true.",
        "text": "`format`: `text`, `json_object` or `json_schema`. `verbosity` is echoed, and asks nothing of models "
        "that do not know it.",
        "reasoning": "`effort` is given to the chat template. `summary` may be `auto`: the reasoning itself is given.",
        "include": f"`{INCLUDE_LOGPROBS}`; `{INCLUDE_ENCRYPTED}` adds nothing, as reasoning is given in plain.",
        "top_logprobs": "0 to 20 alternatives to each token of the text; more than 0 asks for log-probabilities.",
        "metadata": "Up to 16 pairs of strings, kept and given back.",
        "presence_penalty": "-2 to 2.",
        "frequency_penalty": "-2 to 2.",
        "seed": "64-bit integer. The same seed and parameters give the same tokens.",
        "stop": "A string or up to 16 non-empty strings of up to 500 characters, found across token borders.",
        **dict.fromkeys(_AS_IN_CHAT, "As in a chat completion."),
    },
    harmless={
        "user": Harmless("a string", (str,), _CALLER),
        "safety_identifier": Harmless("a string", (str,), f"{_CALLER}; echoed"),
        "service_tier": Harmless("a string", (str,), "there is one tier, `default`"),
        "max_tool_calls": Harmless("an integer", (int,), "limits built-in tools, and there are none; echoed"),
        "prompt_cache_key": Harmless("a string", (str,), f"{_CACHE}; echoed"),
        "prompt_cache_options": Harmless("an object", (dict,), _CACHE),
        "prompt_cache_retention": Harmless("a string", (str,), _CACHE),
    },
    refused={
        "background": Refused(_BACKGROUND, (False,)),
        "background_options": Refused(_BACKGROUND),
        "truncation": Refused("a prompt is never shortened", ("disabled",)),
        "conversation": Refused("conversations are not stored; use previous_response_id"),
        "prompt": Refused("there are no stored prompt templates"),
        "context_management": Refused("a context is never compacted", ([],)),
        "moderation": Refused("this server does not moderate"),
        "access_programs": Refused("there are none"),
        "image": Refused("this server reads and writes text only"),
        "stream_options": Refused("stream chunks are not padded", ({}, {"include_obfuscation": False})),
        "reasoning.summary": Refused("reasoning is given as it is, not summarized", ("auto",)),
        "reasoning.generate_summary": Refused("reasoning is given as it is, not summarized", ("auto",)),
        "reasoning.context": Refused("the chat template decides what it shows of earlier reasoning", ("auto",)),
        "reasoning.mode": Refused("there is one mode", ("standard",)),
        "messages": Refused(f"{_CHAT} `input`"),
        "max_tokens": Refused(f"{_CHAT} `max_output_tokens`"),
        "max_completion_tokens": Refused(f"{_CHAT} `max_output_tokens`"),
        "response_format": Refused(f"{_CHAT} `text.format`"),
        "reasoning_effort": Refused(f"{_CHAT} `reasoning.effort`"),
        "verbosity": Refused(f"{_CHAT} `text.verbosity`"),
        "logprobs": Refused(f"{_CHAT} `top_logprobs`", (False,)),
        "functions": Refused(f"{_CHAT} `tools`", ([],)),
        "n": Refused("a response is one answer", (1,)),
        "return_token_ids": Refused("a response has no place for them", (False,)),
    },
)
