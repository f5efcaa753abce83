"""Chat templates of every habit: parts or strings, mappings or text, tools, variables, and prompts left open."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.chat_request import TemplateAsked
from gateway.openai_errors import ApiError
from gateway.tokenizer import ChatTokenizer, load_tokenizer
from tests.support.text_tokenizers import build_byte_level

PARTS = "{% for m in messages %}{{ m.role }}:{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endfor %}"
PARTS_BY_NAME = (
    "{% for m in messages %}{% set content = m.content %}{% for p in content %}[{{ p.text }}]{% endfor %}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
MAPPING = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for key, value in c.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}{% endfor %}{% endfor %}"
)
TEXT_ARGUMENTS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<' + c.function.arguments + '>' }}{% endfor %}{% endfor %}"
)
TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ 'no thoughts' }}{% endif %}{% endif %}"
)
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f", "description": "does f"}}


def with_template(folder: Path, template: str) -> ChatTokenizer:
    """A tokenizer whose chat template is this one."""
    build_byte_level(folder)
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder)


def rendered(tokenizer: ChatTokenizer, *messages: dict[str, Any], tools: tuple[Any, ...] = (), **asked: Any) -> str:
    """The prompt's text."""
    return tokenizer.template.render(messages, TemplateAsked(**asked), tools).plain


@pytest.mark.parametrize(
    ("template", "expected"), [(PARTS, "user:[a][b]"), (PARTS_BY_NAME, "[a][b]"), (EITHER, "a\nb"), (MAPPING, "a\nb")]
)
def test_content_is_what_the_template_loops_over(tmp_path: Path, template: str, expected: str):
    """Parts where it takes nothing else, one string where it takes one."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert rendered(with_template(tmp_path, template), {"role": "user", "content": parts}) == expected


def test_a_string_becomes_a_part_where_parts_are_wanted(tmp_path: Path):
    """A loop over a string would spell it out."""
    assert rendered(with_template(tmp_path, PARTS), {"role": "user", "content": "ab"}) == "user:[ab]"


@pytest.mark.parametrize(("template", "expected"), [(MAPPING, "a=1;"), (TEXT_ARGUMENTS, '<{"a": 1}>')])
def test_arguments_of_calls_are_what_the_template_reads(tmp_path: Path, template: str, expected: str):
    """A mapping for nearly all, JSON text for some."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    tokenizer = with_template(tmp_path, template)
    assert rendered(tokenizer, USER, {"role": "assistant", "content": "", "tool_calls": [call]}) == f"a{expected}"


def test_a_template_may_mark_what_is_generated(tmp_path: Path):
    """Transformers' own tag is understood when the template is looked at."""
    tokenizer = with_template(tmp_path, GENERATION)
    assert "messages" in tokenizer.template.wants.variables
    assert rendered(tokenizer, USER, {"role": "assistant", "content": "b"}) == "ab"


def test_tools_are_shown_where_the_template_shows_them(tmp_path: Path):
    """And refused where it does not: the model would know of none."""
    assert '"does f"' in rendered(with_template(tmp_path / "with", TOOLS), USER, tools=(TOOL,))
    with pytest.raises(ApiError) as caught:
        rendered(with_template(tmp_path / "without", EITHER), USER, tools=(TOOL,))
    assert (caught.value.status, caught.value.param) == (400, "tools")


@pytest.mark.parametrize("key", ["description", "parameters"])
def test_a_tool_cannot_write_control_tokens(tmp_path: Path, key: str):
    """Neither in a value nor in a key."""
    tokenizer = with_template(tmp_path, TOOLS)
    value = "<|im_end|>" if key == "description" else {"properties": {"<|im_end|>": {}}}
    function = {**TOOL["function"], key: value}  # type: ignore[dict-item]
    prompt = tokenizer.render_prompt([USER], None, [{"type": "function", "function": function}])
    assert prompt.ids.count(2) == 1
    assert "<|im_end|>" in tokenizer.template.render([USER], TemplateAsked(), [{"function": function}]).plain


def test_variables_reach_the_template(tmp_path: Path):
    """Those of the caller, and those that an effort stands for."""
    tokenizer = with_template(tmp_path, TOOLS)
    assert rendered(tokenizer, USER, kwargs={"enable_thinking": False}).endswith("no thoughts")
    assert tokenizer.template.effort_variables("none") == {"enable_thinking": False}
    assert tokenizer.template.effort_variables("high") == {"enable_thinking": True}


def test_an_effort_needs_a_template_that_knows_of_one(tmp_path: Path):
    """As OpenAI refuses it to models that do not reason; none at all is what they do anyway."""
    tokenizer = with_template(tmp_path, EITHER)
    assert tokenizer.template.effort_variables("none") == {}
    with pytest.raises(ApiError) as caught:
        tokenizer.template.effort_variables("low")
    assert caught.value.param == "reasoning_effort"


RESERVED = {
    name
    for function in (PreTrainedTokenizerFast.apply_chat_template, render_jinja_template)
    for name in inspect.signature(function).parameters
}


@pytest.mark.parametrize("name", sorted({"messages", "conversations"} | RESERVED - {"documents"}))
def test_a_variable_cannot_take_the_place_of_what_is_not_one(tmp_path: Path, name: str):
    """Least of all the template itself."""
    with pytest.raises(ApiError) as caught:
        rendered(with_template(tmp_path, TOOLS), USER, kwargs={name: "x"})
    assert (caught.value.status, caught.value.param) == (400, "chat_template_kwargs")


def test_documents_need_a_template_that_shows_them(tmp_path: Path):
    """Never dropped in silence."""
    documents = {"documents": [{"title": "t", "text": "d"}]}
    knows = with_template(tmp_path / "knows", "{% for d in documents or [] %}{{ d.text }}{% endfor %}")
    assert rendered(knows, USER, kwargs=documents) == "d"
    with pytest.raises(ApiError) as caught:
        rendered(with_template(tmp_path / "not", EITHER), USER, kwargs=documents)
    assert caught.value.param == "documents"


def test_a_prompt_may_end_with_a_message_left_open(tmp_path: Path):
    """Or without opening the assistant's turn."""
    tokenizer = with_template(tmp_path, TOOLS)
    begun = {"role": "assistant", "content": "Once upon"}
    open_end = rendered(tokenizer, USER, begun, add_generation_prompt=False, continue_final_message=True)
    assert open_end.endswith("<|im_start|>assistant\nOnce upon")
    assert rendered(tokenizer, USER, add_generation_prompt=False).endswith("a<|im_end|>\n")


def test_a_message_that_cannot_be_continued_is_a_400(tmp_path: Path):
    """The template must show its end."""
    tokenizer = with_template(tmp_path, "{{ messages[0].content }}")
    with pytest.raises(ApiError, match="does not appear") as caught:
        rendered(
            tokenizer,
            USER,
            {"role": "assistant", "content": "x" * 5_000},
            add_generation_prompt=False,
            continue_final_message=True,
        )
    assert len(caught.value.message) < 1_000


def test_the_prompts_tail_is_its_text_as_the_model_sees_it(tmp_path: Path):
    """Control tokens included, marks of spelled ones not."""
    tail = with_template(tmp_path, TOOLS).render_prompt([{"role": "user", "content": "<|im_end|>"}]).tail
    assert tail == "<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
