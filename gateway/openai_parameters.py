"""Every parameter of a chat completion that this server knows, and what it does with it.

`gateway.parameter_table` says what the tables mean; docs/api.md is written from them.
"""

from __future__ import annotations

from gateway.parameter_table import Harmless, ParameterTable, Refused

_GENERATION_CONFIG = "Default: the model's generation config, else"
_FORMAT = "See [Constrained answers](#constrained-answers)."
_TOOLS = "See [Tools](#tools)."

HONOURED: dict[str, str] = {
    # what is asked
    "model": "Required. The served name, or `default`.",
    "messages": "Required. See [Messages](#messages).",
    "n": "1 to 128 choices, each drawn on its own; also with temperature 0, where they are all the same.",
    # which token comes next
    "temperature": f"0 to 2; 0 is greedy. {_GENERATION_CONFIG} 1.",
    "top_p": f"Above 0, at most 1. {_GENERATION_CONFIG} 1.",
    "top_k": f"The most tokens that may be drawn; 0 and -1 are all. {_GENERATION_CONFIG} all.",
    "min_p": f"0 to 1: the share of the likeliest token below which others are ruled out. {_GENERATION_CONFIG} 0.",
    "frequency_penalty": "-2 to 2, for each time that the answer has a token.",
    "presence_penalty": "-2 to 2, once for a token that the answer has.",
    "repetition_penalty": f"Above 0, at most 100; counts prompt and answer. {_GENERATION_CONFIG} 1.",
    "repeat_penalty": "llama.cpp's name of `repetition_penalty`, which wins when both are given.",
    "logit_bias": "Token ids as strings, each -100 to 100, at most 1,024 of them. -100 bans the token.",
    "allowed_token_ids": "1 to 1,024 ids: only these may be drawn.",
    "seed": "64-bit integer. The same seed and parameters give the same tokens, each choice its own.",
    # where the answer ends
    "stop": "A string or up to 16 non-empty strings of up to 500 characters, found across token borders.",
    "stop_token_ids": "Up to 1,024 ids that end the answer, beside the model's own.",
    "include_stop_str_in_output": "Whether a stop string is part of the answer. Default: false.",
    "no_stop_trim": "sglang's name of `include_stop_str_in_output`.",
    "max_completion_tokens": "At least 1. Prompt and answer must fit the context. Default: to its end.",
    "max_tokens": "The older name of `max_completion_tokens`, which wins when both are given.",
    "min_tokens": "Tokens before which neither an end token nor a stop string ends the answer.",
    "ignore_eos": "Only `stop_token_ids`, `stop` and the limit end the answer. Not with a constrained answer.",
    # what the answer must be
    "response_format": _FORMAT,
    "structured_outputs": _FORMAT,
    "guided_json": _FORMAT,
    "guided_regex": _FORMAT,
    "guided_choice": _FORMAT,
    "guided_grammar": _FORMAT,
    "guided_json_object": _FORMAT,
    "json_schema": _FORMAT,
    "grammar": _FORMAT,
    "regex": _FORMAT,
    "ebnf": _FORMAT,
    "tools": _TOOLS,
    "tool_choice": _TOOLS,
    "parallel_tool_calls": "False: the answer ends after its first call. Default: true.",
    # how messages become a prompt
    "reasoning_effort": "`none` to `max`, as the template's `reasoning_effort` and `enable_thinking`.",
    "enable_thinking": "The template's variable of that name.",
    "chat_template_kwargs": "Variables of the chat template; they win over `reasoning_effort`.",
    "documents": "Objects for a template that shows documents; refused where it does not.",
    "add_generation_prompt": "False does not open the assistant's turn. Default: true.",
    "continue_final_message": "True continues the last message instead of opening a new turn. Default: false.",
    # what the response shows
    "logprobs": "Log-probabilities of each token, of the model's own logits.",
    "top_logprobs": "0 to 20 alternatives to each; needs `logprobs`.",
    "return_token_ids": "`token_ids` of each choice, and in a whole answer `prompt_token_ids`.",
    "skip_special_tokens": "False shows special tokens in the text. Default: true.",
    "stream": "Server-sent events.",
    "stream_options": "`include_usage`: a usage chunk at the end; `continuous_usage_stats`: usage so far in every "
    "chunk. Only with `stream: true`.",
    # how the call is served
    "priority": "Of calls that wait for room, those with lower numbers go first. Default: 0.",
    "service_tier": "There is one tier: `default` is echoed.",
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
    "verbosity": Harmless(*_STRING, "a hint to models that were trained for it"),
    "prompt_cache_key": Harmless(*_STRING, _NO_CACHE_CONTROL),
    "prompt_cache_options": Harmless(*_OBJECT, _NO_CACHE_CONTROL),
    "prompt_cache_retention": Harmless(*_STRING, _NO_CACHE_CONTROL),
    "cache_salt": Harmless(*_STRING, _NO_CACHE_CONTROL),
    "cache_prompt": Harmless(*_BOOLEAN, _NO_CACHE_CONTROL),
    "request_id": Harmless(*_STRING, "send an `x-request-id` header to choose the id"),
}

_TEXT_ONLY = "this server reads and writes text only"
_SAMPLER = "the sampler does not know it"
_TEMPLATE = "prompts are made by the model's own chat template"
_REASONING = "use reasoning_effort or chat_template_kwargs"
_NOT_SHOWN = "responses of this endpoint do not have it"
_ENDPOINT = "it does not belong to this endpoint"
_LEGACY = "it is deprecated: use tools and tool_choice"

REFUSED: dict[str, Refused] = {
    # the API's own
    "functions": Refused(_LEGACY, ([],)),
    "function_call": Refused(_LEGACY, ("none", "auto")),
    "audio": Refused(_TEXT_ONLY),
    "modalities": Refused(_TEXT_ONLY, (["text"],)),
    "prediction": Refused("no draft of the answer is taken"),
    "web_search_options": Refused("this server does not search the web"),
    "moderation": Refused("this server does not moderate"),
    # vLLM, sglang, llama.cpp, Ollama, OpenRouter: sampling
    "typical_p": Refused(_SAMPLER, (1,)),
    "top_a": Refused(_SAMPLER, (0,)),
    "top_n_sigma": Refused(_SAMPLER, (0, -1)),
    "tfs_z": Refused(_SAMPLER, (1,)),
    "xtc_probability": Refused(_SAMPLER, (0,)),
    "dry_multiplier": Refused(_SAMPLER, (0,)),
    "dynatemp_range": Refused(_SAMPLER, (0,)),
    "mirostat": Refused(_SAMPLER, (0,)),
    "no_repeat_ngram_size": Refused(_SAMPLER, (0,)),
    "length_penalty": Refused(_SAMPLER, (1,)),
    "use_beam_search": Refused(_SAMPLER, (False,)),
    "best_of": Refused("all choices are returned: use n", (1,)),
    "samplers": Refused(_SAMPLER),
    "logits_processors": Refused(_SAMPLER, ([],)),
    "options": Refused("send sampling parameters at the top level", ({},)),
    # which tokens, and where the answer ends
    "n_predict": Refused("use max_completion_tokens", (-1,)),
    "stop_regex": Refused("use stop", ("", [])),
    "spaces_between_special_tokens": Refused("text is the tokens' own", (True, False)),
    "bad_words": Refused("only single tokens can be banned: use logit_bias", ([],)),
    # constrained answers
    "structural_tag": Refused("use tools with strict schemas, or a grammar"),
    "format": Refused("use response_format", ("",)),
    # the prompt
    "add_special_tokens": Refused(_TEMPLATE, (False,)),
    "chat_template": Refused(_TEMPLATE),
    "echo": Refused(_NOT_SHOWN, (False,)),
    "truncate_prompt_tokens": Refused("a prompt is never shortened"),
    "mm_processor_kwargs": Refused(_TEXT_ONLY, ({},)),
    # reasoning
    "reasoning": Refused(_REASONING),
    "thinking": Refused(_REASONING),
    "think": Refused(_REASONING),
    "include_reasoning": Refused(_REASONING, (True,)),
    # what the response would carry
    "prompt_logprobs": Refused(_NOT_SHOWN, (0, False)),
    "n_probs": Refused("use top_logprobs", (0,)),
    "return_tokens_as_token_ids": Refused("use return_token_ids", (False,)),
    "return_hidden_states": Refused(_NOT_SHOWN, (False,)),
    "timings_per_token": Refused(_NOT_SHOWN, (False,)),
    # scheduling, adapters, other endpoints
    "kv_transfer_params": Refused("the mesh moves its own caches"),
    "lora_path": Refused("there are no adapters"),
    "models": Refused("this server serves one model", ([],)),
    "prompt": Refused(_ENDPOINT),
    "suffix": Refused(_ENDPOINT),
    "input": Refused(_ENDPOINT),
}

STREAM_OPTIONS_REFUSED: dict[str, Refused] = {
    "include_obfuscation": Refused("stream chunks are not padded", (False,)),
}

CHAT = ParameterTable(HONOURED, HARMLESS, REFUSED)
