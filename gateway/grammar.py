"""Grammars that answers must match, as the text that nodes give to llguidance, each checked before it is sent.

An answer's grammar is put together from named pieces: one that says where reasoning, calls and content stand
(`Piece.lark`), and one for each thing that a caller constrains (a schema, an expression, a grammar of the caller's
own). llguidance keeps the pieces' names apart, so a caller's rules never meet ours.

Behind a comma or colon of JSON there may be one space, and between any of its tokens one line break with up to
`INDENT_CHARS_MAX` characters of indentation: room for compact and pretty-printed JSON as everybody writes it, and none
for a model that would put spaces before commas, or go on with white space for ever.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache, lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from gateway.chat_request import FormatAsked
from gateway.openai_errors import ApiError, invalid_value
from shared.fields import GRAMMAR_CHARS_MAX, GRAMMAR_START_FUEL, GRAMMAR_STEP_FUEL

INDENT_CHARS_MAX = 16
LINE_BREAK = rf"\n[ \t]{{0,{INDENT_CHARS_MAX}}}"
_SPACING = {"whitespace_pattern": LINE_BREAK, "item_separator": ", ?", "key_separator": ": ?"}
REASON_CHARS_MAX = 300
"""How much of llguidance's reason is repeated: it quotes the grammar."""
COMPILED_MAX = 64
"""Grammars that are remembered as valid, of up to 96 KiB each: an application sends the same few again and again."""

MULTIPLE_OF_MAX = 10_000
"""Bound of the least common multiple of all `multipleOf` in a grammar, powers of ten aside: an automaton that tells
multiples of N apart has N states, which the nodes would build while everybody waits."""
TRIAL_TOKENS = 16
"""How far a grammar is followed here, over single bytes, before nodes are given it."""

_LIMITS = LLParserLimits(  # as on the nodes
    verbose_errors=False, initial_lexer_fuel=GRAMMAR_START_FUEL, step_lexer_fuel=GRAMMAR_STEP_FUEL
)
_MULTIPLE_OF = re.compile(r'multipleOf\\*"\s*:\s*([-+.\deE]+)')
_TOKEN_ID = re.compile(r"<\[\d+\]>")
_ANY_BYTE = json.dumps('"x"')[1:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One named part of a grammar, in one of two notations.

    Args:
        name: By which other pieces mean it, as ``@name``.
        lark: Its rules, `start` first.
        schema: Or a JSON schema.
    """

    name: str
    lark: str | None = None
    schema: Mapping[str, Any] | None = None


def json_piece(name: str, schema: Mapping[str, Any], *, strict: bool) -> Piece:
    """JSON that follows a schema.

    Args:
        name: The piece's.
        schema: As the caller gave it; empty for any object.
        strict: False lets keywords go unenforced that cannot be, and takes `oneOf` for `anyOf`; otherwise
            `compile_pieces` refuses them.
    """
    options = {**_SPACING, "lenient": not strict, "coerce_one_of": not strict}
    return Piece(name=name, schema={**(schema or {"type": "object"}), "x-guidance": options})


def format_piece(asked: FormatAsked, name: str) -> Piece:
    """What a caller wants content to be; not for `text`.

    Raises:
        ApiError: 400 that names the parameter: what should be a schema, or a grammar, is none.
    """
    match asked.kind:
        case "json_object":
            return json_piece(name, {}, strict=True)
        case "json_schema":
            return json_piece(name, _schema(asked), strict=asked.strict)
        case "choice":
            return Piece(name=name, lark="start: " + " | ".join(map(quote, asked.value)))
        case "regex":
            grammars = json.loads(LLMatcher.grammar_from_regex(asked.value))["grammars"]
            return Piece(name=name, lark=grammars[0]["lark_grammar"])
        case "grammar":
            return Piece(name=name, lark=_lark(asked))
        case "text":
            raise ValueError("free text has no grammar")


def quote(text: str) -> str:
    """A text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def compile_pieces(pieces: Sequence[Piece], param: str) -> str:
    """The grammar's text, which llguidance has accepted.

    Args:
        pieces: The first one is where an answer begins.
        param: What the caller gave, for messages.

    Raises:
        ApiError: 400 with llguidance's own reason.
    """
    try:
        text = json.dumps({"grammars": [_piece_json(piece) for piece in pieces]})
    except RecursionError as error:
        raise _unenforceable(param, "it is nested too deeply") from error
    if len(text) > GRAMMAR_CHARS_MAX:
        raise invalid_value(param, f"the grammar made of it has {len(text)} characters, more than {GRAMMAR_CHARS_MAX}")
    reason = _fault(text)
    if reason:
        raise _unenforceable(param, reason)
    return text


@lru_cache(COMPILED_MAX)
def _fault(text: str) -> str:
    """What is wrong with a grammar; empty where nothing is."""
    multiple = _least_multiple(text)
    if multiple > MULTIPLE_OF_MAX:
        return f"multipleOf: the least common multiple is {multiple}, more than {MULTIPLE_OF_MAX}"
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(text, limits=_LIMITS)
    return (messages[0] if messages else "unknown") if is_wrong else _trial_fault(text)


def _trial_fault(text: str) -> str:
    """What a node would find: some grammars are only refused when they are followed.

    The model's own tokens stand for a letter here, since a vocabulary of bytes does without loading the model's.
    """
    matcher = LLMatcher(_bytes(), _TOKEN_ID.sub(lambda _: _ANY_BYTE, text), limits=_LIMITS, log_level=0)
    for _ in range(TRIAL_TOKENS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little") if not matcher.is_error() else 0
        if matcher.is_error() or not mask or not matcher.consume_token((mask & -mask).bit_length() - 1):
            break
    return str(matcher.get_error()).removesuffix("<non-verbose/>") if matcher.is_error() else ""


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def _least_multiple(text: str) -> int:
    """Of all `multipleOf` in a grammar's text, each without its decimal point and the zeros at its end."""
    multiple = 1
    for number in _MULTIPLE_OF.findall(text):
        try:
            digits = Decimal(number).normalize().as_tuple().digits
        except InvalidOperation:
            continue  # llguidance says what is wrong with it
        multiple = math.lcm(multiple, int("".join(map(str, digits))) or 1)
    return multiple


def _piece_json(piece: Piece) -> dict[str, object]:
    if piece.schema is not None:
        return {"name": piece.name, "json_schema": piece.schema}
    return {"name": piece.name, "lark_grammar": piece.lark}


def _schema(asked: FormatAsked) -> Mapping[str, Any]:
    """The schema, which some callers send as text."""
    schema = asked.value
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise invalid_value(asked.param, f"not valid JSON ({error})") from error
    if not isinstance(schema, Mapping):
        raise invalid_value(asked.param, "expected a JSON schema that is an object")
    return schema


def _lark(asked: FormatAsked) -> str:
    """A caller's grammar in Lark's notation; llama.cpp's (GBNF) is converted."""
    try:
        return str(any_to_lark(asked.value))
    except Exception as error:  # the converter raises bare exceptions
        raise _unenforceable(asked.param, str(error)) from error


def _unenforceable(param: str, reason: str) -> ApiError:
    words = " ".join(reason.split())[:REASON_CHARS_MAX]
    return invalid_value(param, f"it cannot be enforced: {words}")
