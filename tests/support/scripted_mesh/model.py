"""A model folder without weights: configs, a byte-level tokenizer and a chat template, built in a moment."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.scripted_mesh.script import Answer, ModelPart, ScriptError

NUM_LAYERS = 24
"""Divided by every number of hops up to four, and enough for eight."""
VOCAB_SIZE = 640
BOS = "<|begin_of_text|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", BOS)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added tokens that are shown, as in Qwen's tokenizers."""

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

CORPUS = (
    "The mesh serves a model that no one machine can run alone, and nobody waiting sees more than a pause.",
    "Sunny with a little rain. The weather in Paris, London, Berlin and Tokyo is fine today, about 21 degrees.",
    "Ein Knoten fällt aus, und der Satz geht weiter. Wie schön!",
    "你好世界。今天天气很好。",
    "😀 🎉 emoji are four bytes each",
    '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}',
    "def add(a, b):\n    return a + b\n",
    "hello there, this is the answer to your question: one, two, three, four, five",
)

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nYou may call one or more functions. Their signatures are within <tools></tools>:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" + (tool | tojson) }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nFor each call, return a JSON object within <tool_call></tool_call>:\\n" }}
    {{- '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- (tool_call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'user' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""


def build_model(folder: Path, part: ModelPart) -> Path:
    """Write the folder: what a gateway reads of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _train()
    for token in part.end_tokens:
        if tokenizer.token_to_id(token) is None:
            tokenizer.add_special_tokens([AddedToken(token, special=True)])
    if part.bos:
        bos_id = tokenizer.token_to_id(BOS)
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos_id)])
    template = part.chat_template or ("{{- bos_token }}" if part.bos else "") + CHAT_TEMPLATE
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=part.end_tokens[0] if part.end_tokens else None,
        bos_token=BOS if part.bos else None,
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)
    eos_ids = [tokenizer.token_to_id(token) for token in part.end_tokens]
    config = {
        "model_type": "qwen2",
        "num_hidden_layers": NUM_LAYERS,
        "max_position_embeddings": part.context_len,
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": eos_ids[:1] or None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_ids}))
    return folder


def _train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    return tokenizer


@dataclass(frozen=True)
class TextCoder:
    """Between the script's texts and a tokenizer's ids.

    Args:
        tokenizer: The served model's.
        end_id: Ends a scripted answer; None where the model has no end token.
    """

    tokenizer: Tokenizer
    end_id: int | None

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return int(self.tokenizer.get_vocab_size())

    def prompt_text(self, ids: list[int]) -> str:
        """A prompt as rules match it."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def answer_ids(self, answer: Answer) -> list[int]:
        """An answer's tokens without its end."""
        if answer.tokens is not None:
            return list(answer.tokens)
        pieces = answer.pieces if answer.pieces is not None else self._split(answer)
        return [token_id for piece in pieces for token_id in self._encode(piece, by_byte=answer.split == "byte")]

    def _split(self, answer: Answer) -> list[str]:
        text = answer.text or ""
        if answer.split == "model":
            return [text]
        rest, parts = text, []
        while rest:
            marker = next((one for one in self._added() if rest.startswith(one)), rest[0])
            parts.append(marker)
            rest = rest[len(marker) :]
        return parts

    def _added(self) -> list[str]:
        added = self.tokenizer.get_added_tokens_decoder().values()
        return sorted((token.content for token in added), key=len, reverse=True)

    def _encode(self, piece: str, *, by_byte: bool) -> list[int]:
        if by_byte and piece not in self._added():
            characters = "".join(part for part, _ in BYTE_LEVEL.pre_tokenize_str(piece))
            return [self._byte_id(*pair) for pair in zip(characters, piece.encode(), strict=True)]
        return list(self.tokenizer.encode(piece, add_special_tokens=False).ids)

    def _byte_id(self, character: str, byte: int) -> int:
        """The id of one byte: of its character in a byte-level vocabulary, or of its hexadecimal name."""
        found = [self.tokenizer.token_to_id(name) for name in (character, f"<0x{byte:02X}>")]
        token_id = next((one for one in found if one is not None), None)
        if token_id is None:
            raise ScriptError(f"the tokenizer has no token for the byte 0x{byte:02X}")
        return token_id
