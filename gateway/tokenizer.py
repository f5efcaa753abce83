"""The served model's tokenizer, without torch and without weights.

`AutoTokenizer` imports torch wherever torch is installed; `PreTrainedTokenizerFast` does not. What a chat is as text
is for `gateway.chat_template` to say; here it becomes ids, and ids become text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
from transformers import PreTrainedTokenizerFast

from gateway.chat_request import TemplateAsked
from gateway.chat_template import FAULT_CHARS_MAX, ChatTemplate
from gateway.detokenizer import REPLACEMENT, ByteDetokenizer, Detokenizer, PieceTable, WindowDetokenizer, piece_function
from gateway.encode_pool import EncodePool
from gateway.openai_errors import ApiError
from gateway.openai_messages import ChatMessage
from gateway.parser_choice import AS_TOLD, ParserNames, own_parser
from gateway.parsing.choice import choose_family
from gateway.prompt_bound import bytes_per_token_max, tokens_min
from gateway.template_probe import PROBE, TEMPLATE_FAULTS
from shared.errors import MeshError
from shared.models.folder import read_config

INLINE_CHARS_MAX = 8_000
"""Prompts up to this size are tokenized on the event loop, in about 3 ms; larger ones in a thread."""
TAIL_CHARS_MAX = 512
"""How much of a rendered prompt's end is kept: what opens an assistant's turn, and perhaps its reasoning."""
SAMPLING_DEFAULT_BOUNDS = {
    "temperature": 2.0,
    "top_p": 1.0,
    "top_k": 2**31 - 1,
    "min_p": 1.0,
    "repetition_penalty": 2.0,
}
"""Sampling parameters that a generation config may recommend, each above 0 and at most this."""

T = TypeVar("T")

log = structlog.get_logger(__name__)


class TokenizerError(MeshError):
    """A model folder whose tokenizer cannot be used."""


class PromptTooLong(MeshError):
    """A prompt that is too long for the window whatever its tokens are; `tokens_min` is the least it can have."""

    def __init__(self, tokens_min: int) -> None:
        super().__init__("prompt_too_long", f"the prompt has at least {tokens_min} tokens")
        self.tokens_min = tokens_min


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt.

    Args:
        ids: Its tokens.
        tail: The end of its text, control tokens included.
    """

    ids: tuple[int, ...]
    tail: str


class ChatTokenizer:
    """Messages to prompt ids, and ids to text. Built by `load_tokenizer`.

    Args:
        tokenizer: A fast tokenizer, with or without a chat template.
        eos_ids: Ids that end an answer.
        context_len: Positions of the model's window.
        sampling_defaults: What the model's generation config recommends, of `SAMPLING_DEFAULT_BOUNDS`.
        parsers: How tool calls and reasoning are read, where that is not left to the chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        eos_ids: frozenset[int],
        context_len: int,
        sampling_defaults: Mapping[str, float],
        parsers: ParserNames = AS_TOLD,
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self.eos_ids = eos_ids
        self.context_len = context_len
        self.sampling_defaults = dict(sampling_defaults)
        self.template = ChatTemplate(tokenizer)
        self._pool = EncodePool()
        whole = json.loads(self._backend.to_str())
        self._bytes_per_token = {is_ascii: bytes_per_token_max(whole, is_ascii=is_ascii) for is_ascii in (False, True)}
        self.ids_end = max(self._backend.get_vocab().values()) + 1
        added = tokenizer.added_tokens_decoder
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self.families = parsers.choose(choose_family(self.template.source, self._added_ids))
        self.own_parser = own_parser(tokenizer) if parsers == AS_TOLD else None
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        state = self._backend.decoder.__getstate__() if self._backend.decoder else b"null"
        self._piece = piece_function(json.loads(state))
        self._tables: dict[frozenset[str] | None, PieceTable] = {}

    @property
    def has_template(self) -> bool:
        """Whether it can render chats."""
        return bool(self.template.source)

    async def prompt(
        self,
        messages: Sequence[ChatMessage],
        asked: TemplateAsked | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        size: int,
    ) -> Prompt:
        """Render and tokenize; long prompts in a thread, so that no stream waits for them.

        Args:
            messages: As `read_messages` makes them.
            asked: How the template is to be used.
            tools: Definitions of the tools that the model is told of.
            size: About how many characters all that holds; decides where the work is done.

        Raises:
            ApiError: 400 with the template's own words when it does not take these messages; 429 when too many
                long prompts are being read already.
            PromptTooLong: Told from the prompt's size alone; a prompt that is tokenized may be too long as well.
        """
        return await self.run_long(partial(self.render_prompt, messages, asked, tools), size=size)

    def render_prompt(
        self,
        messages: Sequence[ChatMessage],
        asked: TemplateAsked | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Prompt:
        """As `prompt`, in this thread."""
        rendered = self.template.render(messages, asked or TemplateAsked(), tools)
        plain = rendered.plain
        self.check_size(plain)
        try:
            is_marked = rendered.is_marked
            ids = tuple(self.template.control_tokens.encode(rendered.text)) if is_marked else self.encode_text(plain)
        except ValueError as error:  # a spelled control token that this tokenizer cannot tell from a real one
            message = f"These messages cannot be encoded: {str(error)[:FAULT_CHARS_MAX]}"
            raise ApiError(400, message, param="messages", code="invalid_messages") from error
        return Prompt(ids, plain[-TAIL_CHARS_MAX:])

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """The ids of a chat without tools, opened for the assistant to answer."""
        return self.render_prompt(messages).ids

    async def encode_texts(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[tuple[int, ...]]:
        """Tokenize each as it stands, control tokens that it spells recognized; long ones in a thread.

        Args:
            texts: Of any length; `check_size` tells of those that cannot fit the window.
            add_special_tokens: Add what the tokenizer itself puts around a text, for example a begin-of-text token.

        Raises:
            ApiError: 429 when too many long prompts are being read already.
        """

        def encode() -> list[tuple[int, ...]]:
            return [self.encode_text(text, add_special_tokens=add_special_tokens) for text in texts]

        return await self.run_long(encode, size=sum(map(len, texts)))

    async def run_long(self, work: Callable[[], T], *, size: int) -> T:
        """Run what takes time with a text's length: at once for a short one, else in a thread.

        Args:
            work: What to do; what it raises comes through.
            size: About how many characters it is about.

        Raises:
            ApiError: 429 when too many long prompts are being read already.
        """
        return work() if size <= INLINE_CHARS_MAX else await self._pool.run(work)

    def encode_text(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        """Tokenize as it stands: control tokens are recognized, and none is added unless asked for.

        Other threads go on meanwhile: `encode_batch_fast` releases the interpreter, as `encode` does not.
        """
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of these ids."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of these ids, of which each must be below `ids_end`."""
        return [self._backend.id_to_token(token_id) or "" for token_id in ids]

    def description(self) -> dict[str, str | None]:
        """Special tokens and chat template, for callers that render prompts themselves."""
        tokenizer = self._tokenizer
        template = tokenizer.chat_template
        return {
            "eos_token": tokenizer.eos_token,
            "bos_token": tokenizer.bos_token,
            "pad_token": tokenizer.pad_token,
            "unk_token": tokenizer.unk_token,
            "chat_template": template if isinstance(template, str) or template is None else template.get("default"),
        }

    def added_id(self, token: str) -> int | None:
        """The id of a token that was added to the vocabulary as a whole, special or not; None for any other text."""
        return self._added_ids.get(token)

    def spell(self, token_id: int) -> tuple[str, bytes]:
        """The text of a single token, and its own bytes; a special token is spelled as it is written.

        Bytes that are no whole character are U+FFFD in the text. An id outside the vocabulary is empty.
        """
        special = self._special.get(token_id)
        if special is not None:
            return special, special.encode()
        if self._piece is not None:
            data = self._table(frozenset())(token_id)
            return data.decode("utf-8", "replace"), data
        text = self.decode([token_id])
        return text, b"" if REPLACEMENT in text else text.encode()

    def detokenizer(self, prompt_ids: Sequence[int], shown: frozenset[str] | None = frozenset()) -> Detokenizer:
        """A fresh detokenizer for one answer to this prompt.

        Args:
            prompt_ids: What the answer continues.
            shown: Special tokens whose text is to appear; None for all of them.
        """
        if self._piece is not None:
            return ByteDetokenizer(self._table(shown))
        return WindowDetokenizer(partial(self._decode_showing, shown), prompt_ids)

    def _table(self, shown: frozenset[str] | None) -> PieceTable:
        """One per set of shown tokens, of which there are as many as families of models: two or three."""
        table = self._tables.get(shown)
        if table is None:
            if self._piece is None:
                raise ValueError("this tokenizer does more than join bytes")
            special = {
                token_id: content.encode() if shown is None or content in shown else b""
                for token_id, content in self._special.items()
            }
            table = self._tables[shown] = PieceTable(self._backend.id_to_token, self._piece, special)
        return table

    def _decode_showing(self, shown: frozenset[str] | None, ids: Sequence[int]) -> str:
        if shown is not None:
            ids = [token_id for token_id in ids if self._special.get(token_id, "") in {"", *shown}]
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def check_size(self, text: str) -> None:
        """Let a text pass that may fit the window.

        Raises:
            PromptTooLong: It cannot, whatever its tokens are.
        """
        least = tokens_min(text, self._bytes_per_token.__getitem__)
        if least >= self.context_len:
            raise PromptTooLong(least)


def load_tokenizer(folder: Path, *, context_len: int | None = None, parsers: ParserNames = AS_TOLD) -> ChatTokenizer:
    """Read tokenizer, chat template, end tokens, window and sampling defaults from a Hugging Face folder.

    Args:
        folder: Holds ``tokenizer.json``, ``config.json`` and what belongs to them.
        context_len: Overrides the window that the config names.
        parsers: Override what the chat template tells of tool calls and reasoning.

    Raises:
        TokenizerError: If there is no usable tokenizer, or no window is known.
        ModelUnavailable: If the configs cannot be read.
    """
    if not (folder / "tokenizer.json").is_file():
        raise TokenizerError("no_tokenizer", f"{folder} holds no tokenizer.json")
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise TokenizerError("bad_tokenizer", f"the tokenizer in {folder} cannot be read: {error}") from error
    config = read_config(folder)
    window = context_len or config.context_len
    if not window:
        raise TokenizerError("no_context_len", f"{folder}/config.json names no context length; set --context-len")
    eos_ids = config.eos_ids | own_eos_ids(tokenizer)
    if not eos_ids:
        log.warning("tokenizer.no_eos_found", folder=str(folder))
    return ChatTokenizer(
        tokenizer,
        eos_ids=eos_ids,
        context_len=window,
        sampling_defaults=_sampling_defaults(folder / "generation_config.json"),
        parsers=parsers,
    )


def own_eos_ids(tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Ids that end an answer by what tokenizer and chat template say; the configs may name more."""
    ids = {tokenizer.eos_token_id, _end_of_turn(tokenizer)}
    return frozenset(token_id for token_id in ids if token_id is not None)


def _end_of_turn(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The special token that the chat template puts right after an assistant's words, if it does."""
    if not tokenizer.chat_template:
        return None
    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
    try:
        text = str(tokenizer.apply_chat_template(conversation, tokenize=False))
    except TEMPLATE_FAULTS as error:
        log.warning("tokenizer.template_not_probed", reason=str(error))
        return None
    _, found, rest = text.rpartition(PROBE)
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if found and token.special and rest.lstrip().startswith(token.content):
            return int(token_id)
    return None


def _sampling_defaults(path: Path) -> dict[str, float]:
    """What the model's authors recommend, where it is within the API's bounds."""
    generation = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    found = {name: generation.get(name) for name in SAMPLING_DEFAULT_BOUNDS}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= SAMPLING_DEFAULT_BOUNDS[name]
    }
