"""Which parsers read a model's answers, and who decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.answer_shape import answer_parser
from gateway.chat_request import Tool, ToolsAsked
from gateway.parser_choice import AS_TOLD, REASONING_PARSERS, TOOL_PARSERS, ParserNames
from gateway.parsing.choice import FamilyChoice
from gateway.parsing.families import create_parser
from gateway.parsing.response_template import ResponseTemplateParser
from gateway.tokenizer import load_tokenizer
from tests.support.parser_events import call, events_of
from tests.support.tiny_models import build_tokenizer

TOLD = FamilyChoice("hermes", "think")
TEMPLATE: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"close": "<|im_end|>"},
        "tool_calls": {
            "open": "[[",
            "close": "]]",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
    },
}
TOOL = Tool(name="f", parameters={}, strict=False, definition={"type": "function", "function": {"name": "f"}})
OFFERED = ToolsAsked(tools=(TOOL,), mode="auto")
TAIL = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (AS_TOLD, TOLD),
        (ParserNames(tools="mistral"), FamilyChoice("mistral", "think")),
        (ParserNames(reasoning="none"), FamilyChoice("hermes", None)),
        (ParserNames(tools="none", reasoning="mistral_think"), FamilyChoice(None, "mistral_think")),
    ],
)
def test_what_was_asked_for_wins(names: ParserNames, chosen: FamilyChoice) -> None:
    """Each of the two on its own."""
    assert names.choose(TOLD) == chosen


@pytest.mark.parametrize("name", TOOL_PARSERS[2:])
def test_every_tool_parser_that_can_be_named_exists(name: str) -> None:
    """It reads text, with no reasoning beside it."""
    parser = create_parser(tool_family=name, reasoning_family=None, tools=[TOOL.definition], prompt_tail="")
    assert parser.push("") == []


@pytest.mark.parametrize("name", REASONING_PARSERS[2:])
def test_every_reasoning_parser_that_can_be_named_exists(name: str) -> None:
    """It reads text, with no tools beside it."""
    assert create_parser(tool_family=None, reasoning_family=name, tools=[], prompt_tail="").push("") == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder whose tokenizer brings a response template, in a format of its own."""
    fast = build_tokenizer(tmp_path)
    fast.response_template = TEMPLATE
    fast.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen2", "num_hidden_layers": 2, "max_position_embeddings": 64, "eos_token_id": 2}'
    )
    return tmp_path


def test_a_tokenizers_own_response_template_reads_for_an_unknown_family(folder: Path) -> None:
    """Where the chat template tells of none."""
    tokenizer = load_tokenizer(folder)
    parser = answer_parser(tokenizer.families, OFFERED, TAIL, tokenizer.own_parser)
    assert isinstance(parser, ResponseTemplateParser)
    events = events_of(parser, '[[{"name": "f", "arguments": {"a": 1}}]]')
    assert events == call("f", '{"a": 1}')


def test_whoever_runs_the_gateway_may_leave_it_out(folder: Path) -> None:
    """With a parser named, the response template is not asked."""
    tokenizer = load_tokenizer(folder, parsers=ParserNames(tools="none"))
    assert tokenizer.own_parser is None
    parser = answer_parser(tokenizer.families, OFFERED, TAIL, tokenizer.own_parser)
    assert not isinstance(parser, ResponseTemplateParser)
