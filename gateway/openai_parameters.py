"""Every parameter of a chat completion that this server knows, and what it does with it.

`gateway.parameter_table` says what the tables mean; docs/api.md is written from them.
"""

from __future__ import annotations

from gateway.parameter_table import Harmless, ParameterTable, Refused

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

CHAT = ParameterTable(HONOURED, HARMLESS, REFUSED)
