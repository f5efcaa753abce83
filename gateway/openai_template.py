"""How messages become a prompt: the parameters of a chat completion that steer the chat template."""

from __future__ import annotations

from typing import Any

from gateway.chat_request import TemplateAsked
from gateway.openai_errors import invalid_type, invalid_value, quoted
from gateway.openai_fields import Body, read_boolean, read_list, read_object, read_string

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
DOCUMENTS_MAX = 1024
VARIABLES_MAX = 64
"""Far more than any template reads."""


def read_template(body: Body) -> TemplateAsked:
    """How messages become a prompt.

    Raises:
        ApiError: 400 that names the parameter at fault.
    """
    kwargs = dict(read_object(body, "chat_template_kwargs") or {})
    if len(kwargs) > VARIABLES_MAX:
        raise invalid_value("chat_template_kwargs", f"at most {VARIABLES_MAX} variables, got {len(kwargs)}")
    if body.get("enable_thinking") is not None:
        kwargs.setdefault("enable_thinking", read_boolean(body, "enable_thinking"))
    documents = _read_documents(body, "documents") or _read_documents(kwargs, "chat_template_kwargs.documents")
    kwargs.pop("documents", None)
    if documents:
        kwargs["documents"] = documents
    continues = read_boolean(body, "continue_final_message")
    opens = read_boolean(body, "add_generation_prompt", default=not continues)
    if continues and opens:
        raise invalid_value("continue_final_message", "not together with add_generation_prompt")
    return TemplateAsked(
        kwargs=kwargs, add_generation_prompt=opens, continue_final_message=continues, effort=_read_effort(body)
    )


def _read_documents(body: Body, path: str) -> list[dict[str, Any]]:
    documents = read_list(body, "documents", DOCUMENTS_MAX, path=path) or []
    for index, document in enumerate(documents):
        if not isinstance(document, dict):
            raise invalid_type(f"{path}[{index}]", "an object", document)
    return documents


def _read_effort(body: Body) -> str | None:
    effort = read_string(body, "reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise invalid_value("reasoning_effort", f"{quoted(effort)} is not one of {', '.join(EFFORTS)}")
    return effort
