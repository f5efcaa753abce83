"""Tokenizing for callers, as vLLM and lm-eval's remote tokenizer have it, over real HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import jinja2
import pytest

from tests.support.api_server import MODEL, ApiServer, running_api
from tests.support.text_tokenizers import CONTEXT_LEN, build_byte_level, build_metaspace

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One server for all tests."""
    with running_api(build_byte_level(tmp_path_factory.mktemp("model"))) as running:
        yield running


@pytest.fixture
def api(server: ApiServer) -> ApiServer:
    """The server."""
    server.reset()
    return server


def tokenize(api: ApiServer, **body: Any) -> httpx.Response:
    """POST."""
    return api.http.post("/tokenize", json=body)


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_text_there_and_back(api: ApiServer, prefix: str):
    """Control tokens and all."""
    text = "<|im_start|>user\nTh\u00f6 mesh \U0001f600<|im_end|>"
    there = api.http.post(f"{prefix}/tokenize", json={"model": MODEL, "prompt": text}).json()
    assert there == {
        "count": len(there["tokens"]),
        "max_model_len": CONTEXT_LEN,
        "tokens": list(api.tokenizer.encode_text(text)),
        "token_strs": None,
    }
    back = api.http.post(f"{prefix}/detokenize", json={"model": MODEL, "tokens": there["tokens"]})
    assert back.json() == {"prompt": text}


def test_messages_become_the_prompt_that_a_chat_would_have(api: ApiServer):
    """The same ids; and without the opened turn of the assistant."""
    api.answer_with("fine")
    api.chat(messages=MESSAGES)
    whole = tokenize(api, messages=MESSAGES).json()["tokens"]
    assert tuple(whole) == api.generator.requests[0].prompt_ids
    without = tokenize(api, messages=MESSAGES, add_generation_prompt=False).json()["tokens"]
    assert api.tokenizer.decode(without, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert whole[: len(without)] == without


def test_token_strings_on_request(api: ApiServer):
    """The vocabulary's own spelling."""
    body = tokenize(api, prompt="The mesh", return_token_strs=True).json()
    assert len(body["token_strs"]) == body["count"]
    assert "".join(body["token_strs"]).replace("\u0120", " ") == "The mesh"


def test_special_tokens_are_added_as_the_tokenizer_does(api: ApiServer, tmp_path: Any):
    """A begin-of-text token, unless it is not wanted."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    folder = build_metaspace(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.save_pretrained(folder)
    with running_api(folder) as other:
        added = tokenize(other, prompt="a").json()["tokens"]
        assert added[0] == 1
        assert tokenize(other, prompt="a", add_special_tokens=False).json()["tokens"] == added[1:]


@pytest.mark.parametrize("path", ["/tokenizer_info", "/v1/tokenizer_info"])
def test_a_caller_can_render_prompts_itself(api: ApiServer, path: str):
    """What lm-eval's remote tokenizer reads: special tokens, and a template that renders as the server's does."""
    info = api.http.get(path).json()
    assert (info["eos_token"], info["bos_token"], info["pad_token"]) == ("<|im_end|>", None, "<|endoftext|>")
    rendered = jinja2.Template(info["chat_template"]).render(messages=MESSAGES, add_generation_prompt=True)
    ids = tokenize(api, prompt=rendered, add_special_tokens=False).json()["tokens"]
    assert ids == tokenize(api, messages=MESSAGES).json()["tokens"]


def test_a_text_longer_than_the_context_is_counted(api: ApiServer):
    """That is what counting is for."""
    assert tokenize(api, prompt="a " * 20_000).json()["count"] > CONTEXT_LEN


def test_an_empty_text_has_no_tokens(api: ApiServer):
    """It is no mistake."""
    assert tokenize(api, prompt="").json()["tokens"] == []
    assert api.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", "missing_required_parameter"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "messages", "invalid_value"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "invalid_type"),
        ("/tokenize", {"messages": []}, "messages", "empty_array"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens", "invalid_type"),
        ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, "return_token_strs", "invalid_type"),
        ("/detokenize", {}, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": "a"}, "tokens", "invalid_type"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]", "invalid_type"),
        ("/detokenize", {"tokens": [5] * 150_000}, "tokens", "invalid_value"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens", "invalid_value"),
        ("/detokenize", {"tokens": [99999]}, "tokens[0]", "invalid_value"),
    ],
)
def test_what_is_wrong_is_named(api: ApiServer, path: str, body: dict[str, Any], param: str, code: str):
    """A 400 in OpenAI's shape."""
    response = api.http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)


def test_another_model_is_a_404(api: ApiServer):
    """Where one is named."""
    assert tokenize(api, model="other", prompt="a").status_code == 404


def test_strings_are_shown_of_as_many_tokens_as_the_limit_says(api: ApiServer, monkeypatch: pytest.MonkeyPatch):
    """The ids alone have no such limit."""
    monkeypatch.setattr("gateway.api.tokenize.TOKEN_STRINGS_MAX", CONTEXT_LEN)
    fits, too_long = "<|im_start|>" * CONTEXT_LEN, "<|im_start|>" * (CONTEXT_LEN + 1)
    assert len(tokenize(api, prompt=fits, return_token_strs=True).json()["token_strs"]) == CONTEXT_LEN
    refused = tokenize(api, prompt=too_long, return_token_strs=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_token_strs")
    assert tokenize(api, prompt=too_long).json()["count"] == CONTEXT_LEN + 1


def test_long_results_are_written_off_the_event_loop(api: ApiServer, monkeypatch: pytest.MonkeyPatch):
    """Other calls are answered meanwhile."""
    monkeypatch.setattr("gateway.tokenizer.INLINE_CHARS_MAX", 10)
    threads: list[str] = []

    def recorded(name: str) -> None:
        whole = getattr(api.tokenizer, name)

        def record(*args: Any, **options: Any) -> Any:
            threads.append(threading.current_thread().name)
            return whole(*args, **options)

        monkeypatch.setattr(api.tokenizer, name, record)

    recorded("token_strings")
    recorded("decode")
    ids = tokenize(api, prompt="<|im_start|>" * 20, return_token_strs=True).json()["tokens"]
    assert api.http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "<|im_start|>" * 20}
    assert [name.split("_")[0] for name in threads] == ["encode", "encode"]
