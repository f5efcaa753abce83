"""Embeddings, in both encodings."""

from __future__ import annotations

import litellm
import pytest
from langchain_openai import OpenAIEmbeddings


def test_openai(server):
    """base64, which the SDK asks for by itself, and floats say the same."""
    client, inputs = server.openai(), ["a mesh", "of nodes"]
    decoded = server.lax_openai().embeddings.create(model=server.model, input=inputs)
    floats = client.embeddings.create(model=server.model, input=inputs, encoding_format="float")
    assert [item.index for item in floats.data] == [0, 1]
    for one, other in zip(decoded.data, floats.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, rel=1e-6)
    assert decoded.data[0].embedding != decoded.data[1].embedding
    assert decoded.usage.prompt_tokens == decoded.usage.total_tokens > 0


def test_openai_ids(server):
    """Token ids, alone and in a batch."""
    client = server.lax_openai()
    (single,) = client.embeddings.create(model=server.model, input=[65, 66, 67]).data
    batch = client.embeddings.create(model=server.model, input=[[65, 66, 67], [68]]).data
    assert single.embedding == pytest.approx(batch[0].embedding, rel=1e-6)


def test_litellm(server):
    """Its embedding call."""
    response = litellm.embedding(**server.litellm(), input=["a mesh"])
    assert len(response.data) == 1


def test_langchain(server):
    """Its embeddings, without the tokenizer of OpenAI's own models."""
    embeddings = OpenAIEmbeddings(
        base_url=server.base_url, api_key="none", model=server.model, check_embedding_ctx_length=False
    )
    first, second = embeddings.embed_documents(["a mesh", "of nodes"])
    assert len(first) == len(second) > 1
    assert embeddings.embed_query("a mesh") == pytest.approx(first, rel=1e-6)
