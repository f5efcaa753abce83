"""Every parameter of ``POST /v1/messages`` that this server knows, and what it does with it."""

from __future__ import annotations

from gateway.parameter_table import Harmless, ParameterTable, Refused

EFFORTS = ("low", "medium", "high", "xhigh", "max")

KEEP_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
"""What Claude Code always sends: it asks to clear nothing."""

_CHAT = "it belongs to chat completions; here it is"

TABLE = ParameterTable(
    honoured={
        "model": "Required. The served name, or `default`.",
        "messages": "Required. Roles `user`, `assistant` and `system`; blocks `text`, `tool_use`, `tool_result`, "
        "`thinking`. A last message of the assistant's is continued.",
        "max_tokens": "Required, at least 1. More than the context has room for beside the prompt is lowered to that.",
        "system": "A string or text blocks.",
        "stop_sequences": "Up to 16 non-empty strings of up to 500 characters, found across token borders.",
        "stream": "Server-sent events.",
        "temperature": "0 to 1; 0 is greedy. Default: the model's generation config, else 1.",
        "top_p": "Above 0, at most 1. Default: the model's generation config, else 1.",
        "top_k": "Draw from so many of the likeliest tokens.",
        "tools": "Functions of one's own: `name`, `description`, `input_schema`, `strict`.",
        "tool_choice": "`auto`, `any`, `tool` or `none`; `disable_parallel_tool_use`.",
        "thinking": "`enabled`, `adaptive` or `disabled`, given to the chat template as `enable_thinking`; without it "
        "no thinking is asked for or shown. `budget_tokens` is checked, and only `max_tokens` ends thinking. `display` "
        "`omitted` hides it.",
        "output_config": "`effort` is given to the chat template; `format` of type `json_schema`.",
        "output_format": "The older name of `output_config.format`.",
    },
    harmless={
        "metadata": Harmless("an object", (dict,), "identifies the caller to the provider"),
        "service_tier": Harmless("a string", (str,), "there is one tier, `standard`"),
        "cache_control": Harmless(
            "an object", (dict,), "no prompt is kept between calls, so there is nothing to control"
        ),
        "inference_geo": Harmless("a string", (str,), "the mesh is where its machines are"),
        "speed": Harmless("a string", (str,), "there is one speed"),
        "diagnostics": Harmless("an object", (dict,), "asks about a cache that is not shown"),
        "billing_policy": Harmless("an object", (dict,), "nothing is billed"),
        "fallback_credit_token": Harmless("a string", (str,), "nothing is billed"),
        "user_profile_id": Harmless("a string", (str,), "identifies the caller to the provider"),
        "workspace_id": Harmless("a string", (str,), "identifies the caller to the provider"),
    },
    refused={
        "container": Refused("there are no containers"),
        "mcp_servers": Refused("this server calls no other servers", ([],)),
        "thread": Refused("conversations are not kept here: send all messages, without thread"),
        "context_management": Refused("a context is never edited", ({}, {"edits": []}, KEEP_THINKING)),
        "compaction": Refused("a context is never compacted"),
        "fallbacks": Refused("one model is served", ("default", [])),
        "stop": Refused(f"{_CHAT} `stop_sequences`", ([],)),
        "n": Refused("a message is one answer", (1,)),
        "response_format": Refused(f"{_CHAT} `output_config.format`"),
        "max_completion_tokens": Refused(f"{_CHAT} `max_tokens`"),
        "max_tokens_to_sample": Refused("it belongs to an older API; here it is `max_tokens`"),
        "prompt": Refused("it belongs to an older API; here it is `messages`"),
    },
)
