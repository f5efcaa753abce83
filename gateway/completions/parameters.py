"""Every parameter of a text completion that this server knows, and what it does with it.

`gateway.parameter_table` says what the tables mean; docs/api.md is written from them.
"""

from __future__ import annotations

from gateway.parameter_table import Harmless, ParameterTable, Refused
from gateway.sampling_schema import ADDED_PENALTY_MAX, CHOICES_MAX, STOP_CHARS_MAX, STOPS_MAX, TOP_LOGPROBS_MAX

PROMPTS_MAX = 256
"""Of one call. Evaluations send tens; a longer list is better sent as several calls, which can be retried."""
MAX_TOKENS = 16
"""What is generated where nobody says how much; as OpenAI's."""

HONOURED: dict[str, str] = {
    "model": "Required. The served name, or `default`.",
    "prompt": f"Required. A string, up to {PROMPTS_MAX} strings, token ids, or up to {PROMPTS_MAX} lists of token ids.",
    "max_tokens": f"Of each choice, from 0. Prompt and answer must fit the context. Default: {MAX_TOKENS}.",
    "n": f"1 to {CHOICES_MAX} choices for each prompt; choice `j` of prompt `i` has the index `i * n + j`.",
    "best_of": f"At least `n`, at most {CHOICES_MAX}: generate so many and return the `n` likeliest "
    "per token, best first. Not with `stream`.",
    "echo": "Each choice's text begins with its prompt.",
    "logprobs": f"0 to {TOP_LOGPROBS_MAX} alternatives to each token, with `echo` of the prompt's tokens too.",
    "temperature": "0 to 2; 0 is greedy. Default: the model's generation config, else 1.",
    "top_p": "Above 0, at most 1. Default: the model's generation config, else 1.",
    "seed": "64-bit integer. The same seed and parameters give the same tokens.",
    "stop": f"A string or up to {STOPS_MAX} non-empty strings of up to {STOP_CHARS_MAX} characters.",
    "frequency_penalty": f"-{ADDED_PENALTY_MAX:g} to {ADDED_PENALTY_MAX:g}.",
    "presence_penalty": f"-{ADDED_PENALTY_MAX:g} to {ADDED_PENALTY_MAX:g}.",
    "logit_bias": "Token ids and what is added to their logits, -100 to 100.",
    "stream": "Server-sent events.",
    "stream_options": "`include_usage`: a usage chunk at the end; `continuous_usage_stats`: the usage so far in every "
    "chunk. Only with `stream: true`.",
    "top_k": "The most tokens that may be drawn; 0 and -1 are all.",
    "min_p": "0 to 1: rule out tokens less likely than this share of the likeliest.",
    "repetition_penalty": "Above 0; 1 changes nothing. Also as `repeat_penalty`.",
    "repeat_penalty": "llama.cpp's name of `repetition_penalty`.",
    "min_tokens": "Tokens before the answer may end.",
    "ignore_eos": "Only `stop`, `stop_token_ids` and `max_tokens` end the answer.",
    "stop_token_ids": "Ids that end the answer, beside the model's own.",
    "allowed_token_ids": "Only these may be drawn.",
    "add_special_tokens": "Default `true`: add what the tokenizer adds to any text, such as a begin-of-text token.",
    "return_token_ids": "`prompt_token_ids` and `token_ids` of each choice.",
    "priority": "Of the wait for room: lower goes first.",
}

HARMLESS: dict[str, Harmless] = {
    "user": Harmless("a string", (str,), "identifies the caller to the provider"),
    "request_id": Harmless("a string", (str,), "send an `x-request-id` header to choose the id"),
    "cache_salt": Harmless("a string", (str,), "no prompt is shared between callers"),
    "cache_prompt": Harmless("a boolean", (bool,), "there is nothing to control"),
}

_GRAMMAR = "a text completion is not constrained; use a chat completion"
_SAMPLER = "the sampler does not know it"
_ENDPOINT = "it does not belong to this endpoint"

REFUSED: dict[str, Refused] = {
    "suffix": Refused("the model is not asked to fill in the middle", ("",)),
    "messages": Refused(_ENDPOINT),
    "max_completion_tokens": Refused("use max_tokens"),
    "n_predict": Refused("use max_tokens", (-1,)),
    "response_format": Refused(_GRAMMAR, ({"type": "text"},)),
    "structured_outputs": Refused(_GRAMMAR),
    "guided_json": Refused(_GRAMMAR),
    "guided_regex": Refused(_GRAMMAR),
    "guided_choice": Refused(_GRAMMAR),
    "guided_grammar": Refused(_GRAMMAR),
    "json_schema": Refused(_GRAMMAR, ({},)),
    "grammar": Refused(_GRAMMAR, ("",)),
    "regex": Refused(_GRAMMAR, ("",)),
    "ebnf": Refused(_GRAMMAR, ("",)),
    "typical_p": Refused(_SAMPLER, (1,)),
    "top_a": Refused(_SAMPLER, (0,)),
    "tfs_z": Refused(_SAMPLER, (1,)),
    "xtc_probability": Refused(_SAMPLER, (0,)),
    "dry_multiplier": Refused(_SAMPLER, (0,)),
    "mirostat": Refused(_SAMPLER, (0,)),
    "no_repeat_ngram_size": Refused(_SAMPLER, (0,)),
    "length_penalty": Refused(_SAMPLER, (1,)),
    "use_beam_search": Refused(_SAMPLER, (False,)),
    "bad_words": Refused(_SAMPLER, ([],)),
    "logits_processors": Refused(_SAMPLER, ([],)),
    "include_stop_str_in_output": Refused("a stop string is never part of the text", (False,)),
    "no_stop_trim": Refused("a stop string is never part of the text", (False,)),
    "skip_special_tokens": Refused("special tokens are never shown", (True,)),
    "spaces_between_special_tokens": Refused("tokens are joined as the tokenizer joins them", (True, False)),
    "stop_regex": Refused("use stop", ("", [])),
    "truncate_prompt_tokens": Refused("a prompt is never shortened"),
    "prompt_logprobs": Refused("use echo with logprobs", (False,)),
    "prompt_embeds": Refused("a prompt is text or token ids"),
    "n_probs": Refused("use logprobs", (0,)),
    "return_tokens_as_token_ids": Refused("use return_token_ids", (False,)),
    "kv_transfer_params": Refused("the mesh moves its own caches"),
    "lora_path": Refused("there are no adapters"),
}

STREAM_OPTIONS_REFUSED: dict[str, Refused] = {
    "include_obfuscation": Refused("stream chunks are not padded", (False,)),
}

COMPLETIONS = ParameterTable(HONOURED, HARMLESS, REFUSED)
