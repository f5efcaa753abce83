"""docs/api.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.api.embeddings import EMBEDDING_TOKENS_MAX
from gateway.api.responses import PAGE_ITEMS_MAX
from gateway.api.tokenize import DETOKENIZE_TOKENS_MAX, TOKEN_STRINGS_MAX
from gateway.api_reference import PAGE, updated
from gateway.app import create_app
from gateway.call_formats import call_format
from gateway.completions.parameters import PROMPTS_MAX
from gateway.completions.prepare import CALL_LOGPROBS_MAX, CALL_TOKENS_MAX
from gateway.completions.prompt_streams import PROMPTS_AT_ONCE
from gateway.completions.schema import CALL_CHOICES_MAX
from gateway.embeddings.embed import EMBEDS_AT_ONCE
from gateway.embeddings.schema import INPUTS_MAX
from gateway.grammar import INDENT_CHARS_MAX
from gateway.openai_format import CHOICE_TEXTS_MAX, GRAMMAR_TEXT_CHARS_MAX
from gateway.openai_messages import MESSAGES_MAX
from gateway.openai_tools import SCHEMA_BYTES_MAX, TOOLS_MAX
from gateway.parsing.families import FAMILIES
from gateway.request_body import BODY_READ_S
from gateway.responses.store import KEPT_S, RESPONSES_MAX, STORE_BYTES_MAX
from gateway.sampling_schema import CHOICES_MAX, IDS_MAX, STOP_CHARS_MAX, STOP_IDS_MAX, STOPS_MAX
from gateway.state import BODY_BYTES_MAX, GatewayState, ServedModel
from gateway.token_feed import FEED_TOKENS_MAX
from gateway.tokenizer import load_tokenizer
from shared.fields import GRAMMAR_CHARS_MAX
from tests.support.scripted_generator import ScriptedGenerator, ScriptedMesh
from tests.support.text_tokenizers import build_byte_level

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_tables_of_parameters_are_up_to_date():
    """If not: `python -m gateway.api_reference`."""
    assert updated(TEXT) == TEXT


def test_exactly_the_endpoints_that_exist_are_listed(tmp_path: Path):
    """With their methods."""
    state = GatewayState(
        model=ServedModel(names=("m",), fingerprint="f", created=0),
        tokenizer=load_tokenizer(build_byte_level(tmp_path)),
        generator=ScriptedGenerator(),
        mesh=ScriptedMesh(),
    )
    served = {
        f"{method} {re.sub(r'{.*}', '{id}', route.path)}"
        for route in create_app(state).routes
        for method in route.methods - {"OPTIONS"}  # type: ignore[union-attr]
    }
    rows = re.findall(r"^\| (`(?:GET|POST|DELETE) .*?) \| (.*) \|$", TEXT, re.MULTILINE)
    listed = {(name, "Also under `/v1`" in note) for names, note in rows for name in re.findall(r"`([^`]+)`", names)}
    both = {name.replace(" ", " /v1", 1) for name, has_other in listed if has_other}
    assert {name for name, _ in listed} | both == served


def test_the_limits_are_those_of_the_code():
    """Each named limit is on the page."""
    assert f"| request body | {BODY_BYTES_MAX // 2**20} MiB |" in TEXT
    assert f"| messages, or items of an input | {MESSAGES_MAX:,} |" in TEXT
    assert f"| stop strings | {STOPS_MAX} of {STOP_CHARS_MAX} characters |" in TEXT
    assert f"| stop tokens | {STOP_IDS_MAX:,} |" in TEXT
    assert f"| ids allowed or biased | {IDS_MAX:,} |" in TEXT
    assert f"| choices | {CHOICES_MAX} |" in TEXT
    assert f"tools | {SCHEMA_BYTES_MAX // 1024} KiB together |" in TEXT
    assert f"| a grammar or expression as given | {GRAMMAR_TEXT_CHARS_MAX:,} characters |" in TEXT
    assert f"for the nodes | {GRAMMAR_CHARS_MAX // 1024} KiB |" in TEXT
    assert f"a `choice` {CHOICE_TEXTS_MAX:,} texts" in TEXT
    assert f"up to {INDENT_CHARS_MAX} characters of" in TEXT
    assert f"| time for a body to arrive | {BODY_READ_S:g} s |" in TEXT
    tokens = f"{CALL_TOKENS_MAX:,} tokens (or as many as the context has)"
    prompts = f"{PROMPTS_MAX}, with {tokens} and {CALL_CHOICES_MAX:,} choices"
    assert f"| {CALL_LOGPROBS_MAX:,}, alternatives included |" in TEXT
    assert f"| ids to detokenize | {DETOKENIZE_TOKENS_MAX:,}, or as many as the context has |" in TEXT
    assert f"| tokens whose strings are shown | {TOKEN_STRINGS_MAX:,}, or as many as the context has |" in TEXT
    assert f"| {prompts}; {PROMPTS_AT_ONCE} at once |" in TEXT
    assert f"| {INPUTS_MAX:,}, with {EMBEDDING_TOKENS_MAX:,} tokens; {EMBEDS_AT_ONCE} at once |" in TEXT
    stored = f"the {RESPONSES_MAX:,} last used, up to {STORE_BYTES_MAX // 2**20} MiB, for {KEPT_S / 3600:g} hours"
    assert stored in TEXT
    assert f"`limit` is 1 to {PAGE_ITEMS_MAX}" in TEXT
    assert f"| tools | {TOOLS_MAX} |" in TEXT
    assert f"| {FEED_TOKENS_MAX}, and what the sockets hold |" in TEXT


def test_the_formats_in_which_calls_can_be_forced_are_those_of_the_code():
    """No more and no fewer."""
    listed = re.search(r"in the formats (.*?)\. In the others", TEXT, re.DOTALL)
    assert listed is not None
    families = [family for family in FAMILIES if call_format(family, lambda _token: None)]
    assert sorted(re.findall(r"`(\w+)`", listed.group(1))) == sorted(families)


def test_every_error_code_is_listed():
    """A code that clients may meet is explained."""
    sources = [*PAGE.parents[1].glob("gateway/openai_*.py"), *PAGE.parents[1].glob("gateway/api/*.py")]
    sources += [*PAGE.parents[1].glob("gateway/completions/*.py"), *PAGE.parents[1].glob("gateway/embeddings/*.py")]
    names = ("app.py", "request_body.py", "text_input.py", "tokenizer.py", "chat_template.py")
    sources += [PAGE.parents[1] / "gateway" / name for name in names]
    sources += [*PAGE.parents[1].glob("gateway/responses/*.py"), *PAGE.parents[1].glob("gateway/messages/*.py")]
    codes = {code for source in sources for code in re.findall(r'code="(\w+)"', source.read_text())}
    assert codes - {"bad_request"} <= set(re.findall(r"`(\w+)`", TEXT))
