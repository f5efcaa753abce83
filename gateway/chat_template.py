"""The served model's chat template: messages, tools and variables in, the prompt's text out.

The template is rendered by transformers in its own sandbox. What a caller writes stays text: where a message, a
tool's description or a variable spells one of the template's control tokens, such as ``<|im_end|>``, the rendered
text has marks around it (`RenderedChat.is_marked`), and it is encoded as plain text, as OpenAI does. So it cannot end
a turn or open another role's.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.chat_request import TemplateAsked
from gateway.control_tokens import MARKS, ControlTokens
from gateway.openai_errors import ApiError, invalid_value, quoted, unsupported
from gateway.openai_messages import ChatMessage
from gateway.template_probe import TEMPLATE_FAULTS, probe_template

FAULT_CHARS_MAX = 500
"""How much of a template's own words is repeated: transformers quotes the whole chat in some."""
PART_SEPARATOR = "\n"
"""Between text parts, for templates that take strings."""
RESERVED_VARIABLES = frozenset({"messages"}).union(
    inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters,
    inspect.signature(render_jinja_template).parameters,
)
"""Names that mean something to transformers itself: variables pass through both functions by name."""
EFFORT_VARIABLES = ("reasoning_effort", "enable_thinking")


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt as text.

    Args:
        text: What is to be tokenized.
        is_marked: Whether there are marks in it, which are no part of the prompt.
    """

    text: str
    is_marked: bool

    @property
    def plain(self) -> str:
        """Without marks."""
        return MARKS.sub("", self.text) if self.is_marked else self.text


class ChatTemplate:
    """Renders chats.

    Args:
        tokenizer: With or without a chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.source: str | dict[str, str] | None = tokenizer.chat_template
        self.control_tokens = ControlTokens(tokenizer)
        self.wants = probe_template(self.source, lambda messages: self._apply(messages, None, TemplateAsked()))

    def render(
        self, messages: Sequence[ChatMessage], asked: TemplateAsked, tools: Sequence[Mapping[str, Any]] = ()
    ) -> RenderedChat:
        """Render.

        Args:
            messages: As `read_messages` makes them.
            asked: How.
            tools: Definitions of the tools that the model is told of.

        Raises:
            ApiError: 400 with the template's own words when it does not take these messages, or when there is none;
                or for what this template cannot do.
        """
        if not self.source:
            raise ApiError(400, "This model has no chat template.", param="messages", code="no_chat_template")
        self._check(asked, tools)
        inputs: dict[str, Any] = {
            "messages": [self._shaped(message) for message in messages],
            "tools": list(tools) or None,
            "kwargs": dict(asked.kwargs),
        }
        try:
            is_marked = self._spells_control_token(inputs)
            if is_marked:
                inputs = self.control_tokens.mark(inputs)
            text = self._apply(inputs["messages"], inputs["tools"], asked, inputs["kwargs"])
        except TEMPLATE_FAULTS as error:
            message = f"The model's chat template does not take these messages: {str(error)[:FAULT_CHARS_MAX]}"
            raise ApiError(400, message, param="messages", code="invalid_messages") from error
        return RenderedChat(text, is_marked)

    def effort_variables(self, effort: str) -> dict[str, Any]:
        """The template's variables for an effort of reasoning.

        Raises:
            ApiError: 400 where the template has none; `none` asks for nothing then.
        """
        known = [name for name in EFFORT_VARIABLES if name in self.wants.variables]
        if not known and effort != "none":
            raise unsupported("reasoning_effort", "this model's chat template has no setting for it")
        values = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return {name: values[name] for name in known}

    def _check(self, asked: TemplateAsked, tools: Sequence[Mapping[str, Any]]) -> None:
        reserved = sorted(RESERVED_VARIABLES.intersection(asked.kwargs) - {"documents"})
        if reserved:
            raise invalid_value("chat_template_kwargs", f"{quoted(reserved[0])} is not a variable of the template")
        if tools and not self.wants.tools:
            raise unsupported("tools", "this model's chat template does not show tools to the model")
        if asked.kwargs.get("documents") and "documents" not in self.wants.variables:
            raise unsupported("documents", "this model's chat template does not show documents to the model")

    def _apply(
        self,
        messages: list[ChatMessage],
        tools: list[Any] | None,
        asked: TemplateAsked,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message,
                **(kwargs or {}),
            )
        )

    def _shaped(self, message: ChatMessage) -> ChatMessage:
        """A message as this template wants it."""
        shaped = {**message, "content": self._content(message["content"])}
        if message["role"] == "developer" and not self.wants.developer:
            shaped["role"] = "system"
        if self.wants.argument_text and "tool_calls" in message:
            shaped["tool_calls"] = [_with_argument_text(call) for call in message["tool_calls"]]
        return shaped

    def _content(self, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        if self.wants.parts:
            return [{"type": "text", "text": content}] if isinstance(content, str) else content
        return content if isinstance(content, str) else PART_SEPARATOR.join(part["text"] for part in content)

    def _spells_control_token(self, inputs: object) -> bool:
        """Plain searches, one per token: they are several times as fast as one for any of them."""
        return any(token in text for text in _strings(inputs) for token in self.control_tokens.tokens)


def _with_argument_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _strings(value: object) -> Iterable[str]:
    """Every string within JSON-like data, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, Iterable):
        for item in value:
            yield from _strings(item)
