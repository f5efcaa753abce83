"""The served model's tokenizer and chat template, without torch and without weights.

`AutoTokenizer` imports torch wherever torch is installed; `PreTrainedTokenizerFast` does not. The template is
rendered by transformers in its own sandbox. What a caller writes in a message stays text: where it spells one
of the template's control tokens, such as ``<|im_end|>``, it is encoded as plain text, as OpenAI does, and so
cannot end a turn or open another role's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import jinja2
import structlog
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens

from gateway.detokenizer import ByteDetokenizer, Detokenizer, PieceTable, WindowDetokenizer, piece_function
from gateway.encode_pool import EncodePool
from gateway.openai_errors import ApiError
from gateway.openai_messages import ChatMessage
from gateway.prompt_bound import bytes_per_token_max, tokens_min
from shared.errors import MeshError
from shared.models.folder import read_config

INLINE_CHARS_MAX = 8_000
"""Prompts up to this size are tokenized on the event loop, in about 3 ms; larger ones in a thread."""
PROBE = "meshnet-probe"
CONTROL_TOKEN_MARKS = re.compile("[\U000f0000\U000f0001]")
"""What `mark_control_tokens` puts around a control token, and `encode_marked_chat` drops."""

_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)
"""What a template may raise over messages that it was not written for."""

T = TypeVar("T")

log = structlog.get_logger(__name__)


class TokenizerError(MeshError):
    """A model folder whose tokenizer cannot be used."""


class PromptTooLong(MeshError):
    """A prompt that is too long for the window whatever its tokens are; `tokens_min` is the least it can have."""

    def __init__(self, tokens_min: int) -> None:
        super().__init__("prompt_too_long", f"the prompt has at least {tokens_min} tokens")
        self.tokens_min = tokens_min


class ChatTokenizer:
    """Messages to prompt ids, and ids to text. Built by `load_tokenizer`.

    Args:
        tokenizer: A fast tokenizer, with or without a chat template.
        eos_ids: Ids that end an answer.
        context_len: Positions of the model's window.
        sampling_defaults: `temperature` and `top_p` of the model's generation config, where it has them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        eos_ids: frozenset[int],
        context_len: int,
        sampling_defaults: Mapping[str, float],
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self.eos_ids = eos_ids
        self.context_len = context_len
        self.sampling_defaults = dict(sampling_defaults)
        added = tokenizer.added_tokens_decoder
        special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        template = tokenizer.chat_template
        self._control_tokens = _control_tokens(tokenizer)
        self._control_pattern = re.compile("|".join(map(re.escape, self._control_tokens)) or "(?!)")
        whole = json.loads(self._backend.to_str())
        self._bytes_per_token = {is_ascii: bytes_per_token_max(whole, is_ascii=is_ascii) for is_ascii in (False, True)}
        self._pool = EncodePool()
        self.has_template = bool(template)
        self.ids_end = max(self._backend.get_vocab().values()) + 1
        self._knows_developer = "developer" in json.dumps(template)
        state = self._backend.decoder.__getstate__() if self._backend.decoder else b"null"
        piece = piece_function(json.loads(state))
        self._pieces = None if piece is None else PieceTable(self._backend.id_to_token, piece, special_ids)

    async def prompt_ids(
        self, messages: Sequence[ChatMessage], *, size: int, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Render and tokenize; long prompts in a thread, so that no stream waits for them.

        Args:
            messages: As `read_messages` makes them.
            size: About how many characters they hold; decides where the work is done.
            add_generation_prompt: Open the assistant's turn at the end.

        Raises:
            ApiError: 400 with the template's own words when it does not take these messages; 429 when too many
                long prompts are being read already.
            PromptTooLong: Told from the prompt's size alone; a prompt that is tokenized may be too long as well.
        """
        encode = partial(self.encode_chat, messages, add_generation_prompt=add_generation_prompt)
        return await self.run_long(encode, size=size)

    def encode_chat(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> tuple[int, ...]:
        """As `prompt_ids`, in this thread."""
        if not self.has_template:
            raise ApiError(400, "This model has no chat template.", param="messages", code="no_chat_template")
        conversation = [self._map_role(message) for message in messages]
        try:
            is_marked = self._spells_control_token(conversation)
            if is_marked:
                conversation = mark_control_tokens(conversation, self._control_pattern)
            render = self._tokenizer.apply_chat_template
            text = str(render(conversation, tokenize=False, add_generation_prompt=add_generation_prompt))
            self.check_size(CONTROL_TOKEN_MARKS.sub("", text) if is_marked else text)
            return tuple(encode_marked_chat(self._tokenizer, text)) if is_marked else self.encode_text(text)
        except _TEMPLATE_FAULTS as error:
            message = f"The model's chat template does not take these messages: {error}"
            raise ApiError(400, message, param="messages", code="invalid_messages") from error

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

    def spell(self, token_id: int) -> tuple[str, bytes]:
        """A token's text, with U+FFFD where it is no whole character, and its own bytes; special tokens too."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return "", b""
        if self._pieces is None or token in self._control_tokens:
            text = self.decode([token_id], skip_special_tokens=False)
            return text, text.encode()
        data = self._pieces(token_id)
        return data.decode("utf-8", "replace"), data

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

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        """A fresh detokenizer for one answer to this prompt."""
        if self._pieces is not None:
            return ByteDetokenizer(self._pieces)
        return WindowDetokenizer(self.decode, prompt_ids)

    def _map_role(self, message: ChatMessage) -> ChatMessage:
        if message["role"] == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return message

    def check_size(self, text: str) -> None:
        """Let a text pass that may fit the window.

        Raises:
            PromptTooLong: It cannot, whatever its tokens are.
        """
        least = tokens_min(text, self._bytes_per_token.__getitem__)
        if least >= self.context_len:
            raise PromptTooLong(least)

    def _spells_control_token(self, conversation: Iterable[ChatMessage]) -> bool:
        """Plain searches, one per token: they are several times as fast as one for any of them."""
        return any(token in text for text in _strings(conversation) for token in self._control_tokens)


def load_tokenizer(folder: Path, *, context_len: int | None = None) -> ChatTokenizer:
    """Read tokenizer, chat template, end tokens, window and sampling defaults from a Hugging Face folder.

    Args:
        folder: Holds ``tokenizer.json``, ``config.json`` and what belongs to them.
        context_len: Overrides the window that the config names.

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
    )


def own_eos_ids(tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Ids that end an answer by what tokenizer and chat template say; the configs may name more."""
    ids = {tokenizer.eos_token_id, _end_of_turn(tokenizer)}
    return frozenset(token_id for token_id in ids if token_id is not None)


def _control_tokens(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The added tokens that are special or that the template writes, longest first."""
    template = json.dumps(tokenizer.chat_template, ensure_ascii=False)
    tokens = {
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special or (not token.content.isspace() and token.content in template)
    }
    return sorted(tokens, key=len, reverse=True)


def _end_of_turn(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The special token that the chat template puts right after an assistant's words, if it does."""
    if not tokenizer.chat_template:
        return None
    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
    try:
        text = str(tokenizer.apply_chat_template(conversation, tokenize=False))
    except _TEMPLATE_FAULTS as error:
        log.warning("tokenizer.template_not_probed", reason=str(error))
        return None
    _, found, rest = text.rpartition(PROBE)
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if found and token.special and rest.lstrip().startswith(token.content):
            return int(token_id)
    return None


def _sampling_defaults(path: Path) -> dict[str, float]:
    """`temperature` and `top_p` as the model's authors recommend them, where they are within the API's bounds."""
    generation = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    bounds = {"temperature": 2.0, "top_p": 1.0}
    found = {name: generation.get(name) for name in bounds}
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and 0 < value <= bounds[name]
    }


def _strings(value: object) -> Iterable[str]:
    """Every string within JSON-like data, keys aside."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, Iterable):
        for item in value:
            yield from _strings(item)
