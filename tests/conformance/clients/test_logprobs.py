"""Log-probabilities of the answer's tokens."""

from __future__ import annotations

import pytest
from conftest import HELLO, user


def check(logprobs, top):
    """One entry for each token; their bytes are the answer's."""
    assert b"".join(bytes(entry.bytes or b"") for entry in logprobs.content).startswith(HELLO.encode())
    for entry in logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == top
        assert [one.logprob for one in entry.top_logprobs] == sorted(
            (one.logprob for one in entry.top_logprobs), reverse=True
        )


@pytest.mark.parametrize("top", [0, 3])
def test_openai(server, top):
    """Whole and streamed alike."""
    call = {"model": server.model, "messages": user("Hi"), "logprobs": True, "seed": 3}
    call |= {"top_logprobs": top} if top else {}
    whole = server.openai().chat.completions.create(**call).choices[0]
    check(whole.logprobs, top)
    with server.openai().chat.completions.stream(**call) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.logprobs.content == whole.logprobs.content


def test_langchain(server):
    """In the message's metadata."""
    answer = server.langchain(logprobs=True, top_logprobs=2).invoke("Hi")
    assert len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2
