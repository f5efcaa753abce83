"""Texts that come without messages: a string, several, token ids, or several lists of them.

Completions call theirs `prompt`, embeddings `input`. Text is tokenized as it stands: it may spell control tokens,
and the tokenizer adds what it adds to any text (a begin-of-text token, where it has one). Ids stand for themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from gateway.openai_errors import ApiError, invalid_type, invalid_value, missing
from gateway.tokenizer import ChatTokenizer, PromptTooLong

EXPECTED = "a string, an array of strings, an array of token ids, or an array of arrays of token ids"

TextInput = str | tuple[int, ...]


def read_text_inputs(value: object, param: str, *, items_max: int) -> tuple[TextInput, ...]:
    """Check and normalize; a single text is a list of one.

    Args:
        value: As it came.
        param: Its name.
        items_max: How many texts one call may have.

    Raises:
        ApiError: 400 that names the item at fault.
    """
    if value is None:
        raise missing(param)
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise invalid_type(param, EXPECTED, value)
    if not value:
        raise invalid_value(param, "at least one text or token id is required", code="empty_array")
    if _is_id(value[0]):
        return (_read_ids(value, param),)
    if len(value) > items_max:
        raise invalid_value(param, f"at most {items_max} items in one call, got {len(value)}")
    return tuple(_read_item(item, f"{param}[{index}]") for index, item in enumerate(value))


def _read_item(item: object, path: str) -> TextInput:
    if isinstance(item, str):
        return item
    if not isinstance(item, list):
        raise invalid_type(path, "a string or an array of token ids", item)
    return _read_ids(item, path)


def _read_ids(items: Sequence[object], path: str) -> tuple[int, ...]:
    if set(map(type, items)) <= {int}:  # a body may hold millions: the common case is told in one go
        return tuple(cast("Sequence[int]", items))
    index, item = next((index, item) for index, item in enumerate(items) if not _is_id(item))
    raise invalid_type(f"{path}[{index}]", "a token id", item)


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


async def tokenize_inputs(
    inputs: Sequence[TextInput], tokenizer: ChatTokenizer, param: str, *, add_special_tokens: bool = True
) -> list[tuple[int, ...]]:
    """The ids of each text, never none.

    Args:
        inputs: As `read_text_inputs` gives them.
        tokenizer: The served model's.
        param: Their name, for messages.
        add_special_tokens: Add what the tokenizer adds to any text; ids are left as they are.

    Raises:
        ApiError: 400 for an id that is no token, an empty text, or one whose size alone tells that it does not fit
            the window; 429.
    """
    paths = input_paths(inputs, param)
    for item, path in zip(inputs, paths, strict=True):
        if isinstance(item, str):
            _check_size(item, tokenizer, path)
        else:
            check_ids(item, tokenizer, path)
    texts = [item for item in inputs if isinstance(item, str)]
    encoded = iter(await tokenizer.encode_texts(texts, add_special_tokens=add_special_tokens))
    ids = [next(encoded) if isinstance(item, str) else item for item in inputs]
    for one, path in zip(ids, paths, strict=True):
        if not one:
            raise invalid_value(path, "it is empty, and a model needs at least one token")
    return ids


def input_paths(inputs: Sequence[TextInput], param: str) -> list[str]:
    """How messages name each text."""
    return [param] if len(inputs) == 1 else [f"{param}[{index}]" for index in range(len(inputs))]


def check_ids(ids: Sequence[int], tokenizer: ChatTokenizer, path: str) -> None:
    """Let ids pass that are in the vocabulary.

    Raises:
        ApiError: 400.
    """
    if not ids or (min(ids) >= 0 and max(ids) < tokenizer.ids_end):
        return
    index = next(index for index, token_id in enumerate(ids) if not 0 <= token_id < tokenizer.ids_end)
    raise invalid_value(f"{path}[{index}]", f"a token id of this model is from 0 to {tokenizer.ids_end - 1}")


def check_total(ids: Sequence[Sequence[int]], param: str, *, tokens_max: int) -> None:
    """Let a call pass whose texts have at most so many tokens together.

    Raises:
        ApiError: 400.
    """
    total = sum(map(len, ids))
    if total > tokens_max:
        raise invalid_value(param, f"at most {tokens_max} tokens in one call, got {total} in {len(ids)} items")


def input_too_long(tokens: int, context_len: int, path: str, *, at_least: bool = False) -> ApiError:
    """A text that does not fit the model's window even alone."""
    least = "at least " if at_least else ""
    message = f"This model's maximum context length is {context_len} tokens. However, your {path} has {least}{tokens} "
    return ApiError(400, message + "tokens. Please shorten it.", param=path, code="context_length_exceeded")


def _check_size(text: str, tokenizer: ChatTokenizer, path: str) -> None:
    try:
        tokenizer.check_size(text)
    except PromptTooLong as error:
        if error.tokens_min > tokenizer.context_len:  # one that fills the window may still be read
            raise input_too_long(error.tokens_min, tokenizer.context_len, path, at_least=True) from error
