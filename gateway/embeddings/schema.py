"""The body of ``POST /v1/embeddings``: bytes in, a checked `EmbeddingsRequest` or an `ApiError` out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from gateway.embeddings.vectors import EncodingFormat
from gateway.openai_fields import read_boolean, read_word
from gateway.openai_schema import decode_object, read_model
from gateway.parameter_table import Harmless, ParameterTable, Refused
from gateway.text_input import TextInput, read_text_inputs
from shared.messages import Pooling

INPUTS_MAX = 2048
"""As OpenAI's."""

HONOURED: dict[str, str] = {
    "model": "Required. The served name, or `default`.",
    "input": f"Required. A string, up to {INPUTS_MAX} strings, token ids, or up to {INPUTS_MAX} lists of token ids.",
    "encoding_format": "`float` (default), or `base64` of little-endian float32, which OpenAI's SDKs ask for.",
    "pooling": "`mean` (default) of the hidden states of all tokens, or `last`, that of the last token. An extension.",
    "normalize": "`true` (default): vectors of length 1, so that a dot product is the cosine. An extension.",
    "add_special_tokens": "Default `true`: add what the tokenizer adds to any text. An extension.",
}
HARMLESS: dict[str, Harmless] = {
    "user": Harmless("a string", (str,), "identifies the caller to the provider"),
    "request_id": Harmless("a string", (str,), "send an `x-request-id` header to choose the id"),
}
REFUSED: dict[str, Refused] = {
    "dimensions": Refused("a model's hidden states cannot be shortened"),
    "truncate_prompt_tokens": Refused("an input is never shortened", (0,)),
    "messages": Refused("send text as input"),
}
EMBEDDINGS = ParameterTable(HONOURED, HARMLESS, REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingsRequest:
    """One call.

    Args:
        model: Under which name.
        inputs: One vector is wanted for each.
        encoding_format: How vectors are written.
        pooling: How hidden states become one.
        normalize: Whether it is to have length 1.
        add_special_tokens: Add what the tokenizer adds to any text.
        unknown: Names of fields that are no parameter of ours; ignored.
    """

    model: str
    inputs: tuple[TextInput, ...]
    encoding_format: EncodingFormat
    pooling: Pooling
    normalize: bool
    add_special_tokens: bool
    unknown: tuple[str, ...]


def read_embeddings_request(data: bytes) -> EmbeddingsRequest:
    """Decode and check a body.

    Raises:
        ApiError: 400 that names the parameter at fault.
    """
    body = decode_object(data)
    unknown = EMBEDDINGS.check(body)
    return EmbeddingsRequest(
        model=read_model(body),
        inputs=read_text_inputs(body.get("input"), "input", items_max=INPUTS_MAX),
        encoding_format=cast("EncodingFormat", read_word(body, "encoding_format", ("float", "base64"))),
        pooling=cast("Pooling", read_word(body, "pooling", ("mean", "last"))),
        normalize=read_boolean(body, "normalize", default=True),
        add_special_tokens=read_boolean(body, "add_special_tokens", default=True),
        unknown=unknown,
    )
