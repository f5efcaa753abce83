"""The bodies of ``POST /tokenize`` and ``POST /detokenize``: bytes in, checked requests or an `ApiError` out."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.openai_errors import invalid_type, invalid_value, missing
from gateway.openai_fields import read_boolean
from gateway.openai_messages import ChatMessage, read_messages
from gateway.openai_schema import decode_object, read_model
from gateway.state import ANY_MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """One call: either a text or messages.

    Args:
        model: Under which name; any, where none was given.
        text: As it stands.
        messages: For the chat template.
        add_special_tokens: Add what the tokenizer adds to any text. Templates write their own.
        add_generation_prompt: Open the assistant's turn at the end of the messages.
        token_strings: Return those too.
    """

    model: str
    text: str
    messages: list[ChatMessage]
    add_special_tokens: bool
    add_generation_prompt: bool
    token_strings: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest:
    """One call.

    Args:
        model: Under which name; any, where none was given.
        tokens: Ids, of whatever size.
    """

    model: str
    tokens: tuple[int, ...]


def read_tokenize_request(data: bytes) -> TokenizeRequest:
    """Decode and check a body.

    Raises:
        ApiError: 400 that names the parameter at fault.
    """
    body = decode_object(data)
    text, messages = body.get("prompt"), body.get("messages")
    if text is None and messages is None:
        raise missing("prompt")
    if text is not None and messages is not None:
        raise invalid_value("messages", "send either prompt or messages")
    if text is not None and not isinstance(text, str):
        raise invalid_type("prompt", "a string", text)
    add_special_tokens = read_boolean(body, "add_special_tokens", default=messages is None)
    if messages is not None and add_special_tokens:
        raise invalid_value("add_special_tokens", "the chat template writes its own; only a prompt may have them")
    return TokenizeRequest(
        model=_read_optional_model(body),
        text=text or "",
        messages=[] if messages is None else read_messages(messages),
        add_special_tokens=add_special_tokens,
        add_generation_prompt=read_boolean(body, "add_generation_prompt", default=True),
        token_strings=read_boolean(body, "return_token_strs"),
    )


def read_detokenize_request(data: bytes) -> DetokenizeRequest:
    """Decode and check a body.

    Raises:
        ApiError: 400 that names the parameter at fault.
    """
    body = decode_object(data)
    tokens = body.get("tokens")
    if tokens is None:
        raise missing("tokens")
    if not isinstance(tokens, list):
        raise invalid_type("tokens", "an array of token ids", tokens)
    for index, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, int):
            raise invalid_type(f"tokens[{index}]", "a token id", token)
    return DetokenizeRequest(model=_read_optional_model(body), tokens=tuple(tokens))


def _read_optional_model(body: dict[str, object]) -> str:
    return ANY_MODEL if body.get("model") is None else read_model(body)
