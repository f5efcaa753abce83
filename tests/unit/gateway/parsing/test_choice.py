"""Which families a chat template is of."""

from __future__ import annotations

import pytest

from gateway.parsing.choice import REASONING_SIGNS, TOOL_SIGNS, choose_family
from gateway.parsing.families import FAMILIES

BAR = "\N{FULLWIDTH VERTICAL LINE}"


@pytest.mark.parametrize(
    ("template", "tokens", "families"),
    [
        ("{% if tools %}<tool_call>{% endif %}", [], ("hermes", None)),
        ("{% if tools %}<tool_call>{% endif %}<think></think>", [], ("hermes", "think")),
        ("{% if tools %}<tool_call>\n<function=x>\n<parameter=y>{% endif %}</think>", [], ("qwen3_xml", "think")),
        ("{{ tools }}<tool_call><arg_key><arg_value></think>", [], ("glm", "think")),
        ('{{ tools }}{"name": x, "parameters": y}', ["<|python_tag|>"], ("llama3_json", None)),
        ("{{ tools }}", ["<|python_start|>", "<|python_end|>"], ("pythonic", None)),
        ("{{ tools }}[TOOL_CALLS]", ["[THINK]", "[/THINK]"], ("mistral", "mistral_think")),
        (f"message['tool_calls']<{BAR}tool▁calls▁begin{BAR}></think>", [], ("deepseek_v3", "think")),
        (f"{{{{ tools }}}}<{BAR}DSML{BAR}invoke>", ["</think>"], ("deepseek_dsml", "think")),
        ("{{ tools }}<|start|>assistant<|channel|>analysis to=functions.x", [], ("harmony", "harmony")),
        ("{{ tools }}<|open|>x<|sep|><|close|>", [], ("kimi_k3", "kimi_k3")),
        ("{{ tools }}<|tool_call>call:f<tool_call|><|channel>thought<channel|>", [], ("gemma4", "gemma4")),
        ("{{ tools }}<|tool|>x<|/tool|>", ["<|tool_call|>"], ("phi4_mini", None)),
        ("{{ tools }}", ["<|tool_call|>"], ("granite", None)),
        ("<|im_start|>{{ messages }}", ["<tool_call>"], (None, None)),
        ({"default": "x", "tool_use": "{{ tools }}<|START_ACTION|><|START_THINKING|>"}, [], ("command_r", "command_r")),
        (None, ["<tool_call>", "<think>"], (None, None)),
    ],
)
def test_a_template_tells_its_families(template: object, tokens: list[str], families: tuple[str | None, str | None]):
    """By its markers, or those among the tokens; without tools in the template there are no calls."""
    assert choose_family(template, tokens) == families


def test_every_sign_is_of_a_family_that_has_what_it_tells():
    """A choice must be one that `create_parser` can make."""
    for name, _ in TOOL_SIGNS:
        assert FAMILIES[name].create_tool_parser or FAMILIES[name].create_whole_parser
    for name, _ in REASONING_SIGNS:
        assert FAMILIES[name].reasoning or FAMILIES[name].create_whole_parser
