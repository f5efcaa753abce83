"""Raw completions."""

from __future__ import annotations

from conftest import HELLO
from langchain_openai import OpenAI

COUNT = "1, 2, 3, 4, 5"


def test_openai_whole_and_streamed(server):
    """Text as it comes, the default limit being 16 tokens."""
    client, call = server.openai(), {"model": server.model, "prompt": "Count from 1 to 5", "max_tokens": 40}
    whole = client.completions.create(**call)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (COUNT, "stop")
    chunks = list(server.lax_openai().completions.create(**call, stream=True))  # finish_reason is null until the last
    assert "".join(chunk.choices[0].text for chunk in chunks) == COUNT
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    cut = client.completions.create(model=server.model, prompt="Hi")
    assert cut.usage.completion_tokens == 16
    assert HELLO.startswith(cut.choices[0].text)
    assert cut.choices[0].finish_reason == "length"


def test_openai_batches(server):
    """Prompts in order, choices of each beside each other, ids as good as text."""
    client = server.openai()
    batch = client.completions.create(
        model=server.model, prompt=["Count from 1 to 5", "Name a number"], n=2, max_tokens=20
    )
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in batch.choices[:2]] == [COUNT, COUNT]
    assert COUNT not in {choice.text for choice in batch.choices[2:]}
    assert client.completions.create(model=server.model, prompt=[[65, 66], [67]], max_tokens=3).choices[1].index == 1


def test_lm_eval_contract(server):
    """Echo with logprobs scores the prompt, and generates exactly one token."""
    prompts = [[70, 71, 72, 73], [80, 81]]
    scored = server.lax_openai().completions.create(  # nothing predicts the first token: null
        model=server.model, prompt=prompts, echo=True, max_tokens=1, logprobs=1, temperature=0
    )
    assert [choice.index for choice in scored.choices] == [0, 1]
    for choice, prompt in zip(scored.choices, prompts, strict=True):
        entries = choice.logprobs
        assert len(entries.token_logprobs) == len(entries.tokens) == len(prompt) + 1
        assert entries.token_logprobs[0] is None
        for logprob, top in zip(entries.token_logprobs[1:], entries.top_logprobs[1:], strict=True):
            assert logprob <= max(top.values())
            assert logprob in top.values()


def test_langchain(server):
    """Its text model."""
    model = OpenAI(base_url=server.base_url, api_key="none", model=server.model, max_retries=0, max_tokens=40)
    assert model.invoke("Count from 1 to 5") == COUNT
    assert "".join(model.stream("Count from 1 to 5")) == COUNT
