"""docs/protocol.md says what the code does: every table, every example, every link."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import orjson
import pytest

from shared import fields, frame, link_state, messages, websocket
from shared.errors import CACHE_MISS_REASONS
from shared.fields import Struct
from shared.frame import DEFAULT_LIMITS, decode_frame, encode_frame
from shared.link_state import HANDSHAKE, LINK_ERROR, TRANSITIONS, WORK, LinkState
from shared.messages import (
    MESSAGE_TYPES,
    MachineInfo,
    NodeInfo,
    NodeStats,
    SamplingParams,
    decode_header,
    encode_header,
)
from shared.tensor_spec import ITEM_BYTES
from tests.fuzz.fuzz_frame import FRAME_CODES

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "protocol.md"
TEXT = PAGE.read_text()


def table(first_column: str) -> list[list[str]]:
    """The rows below the header row that starts with this column."""
    lines = iter(TEXT.splitlines())
    for line in lines:
        if line.startswith(f"| {first_column} |"):
            break
    else:
        raise AssertionError(f"no table starts with {first_column!r}")
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def first_cells(first_column: str) -> list[str]:
    """The names that a table explains."""
    return [row[0].strip("`") for row in table(first_column)]


def listed_fields(cls: type[Struct]) -> str:
    """A structure's fields as the page writes them: required ones in bold."""
    return ", ".join(
        f"**{field.name}**" if field.default is dataclasses.MISSING else field.name
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
    )


def test_every_message_is_listed_with_its_fields():
    """Kinds and fields are those of the code, in its order."""
    assert {row[0].strip("`"): row[2] for row in table("kind")} == {
        kind: listed_fields(cls) for kind, cls in MESSAGE_TYPES.items()
    }


def test_every_nested_structure_is_listed_with_its_fields():
    """So are the structures that messages nest."""
    assert {row[0].strip("`"): row[1] for row in table("structure")} == {
        cls.__name__: listed_fields(cls) for cls in (NodeInfo, MachineInfo, NodeStats, SamplingParams)
    }


def test_the_state_table_is_the_codes():
    """Rows of the page, with *work* and `either` spelled out, are exactly the transitions."""
    spelled: dict[tuple[str, str, str], str] = {}
    for states, sender, name, after in table("state"):
        senders = ["dialer", "acceptor"] if sender == "either" else [sender]
        names = sorted(WORK) if name == "*work*" else [name]
        for key in product(states.split(", "), senders, names):
            spelled[key] = after
    assert spelled == {(state.value, role, name): after.value for (state, role, name), after in TRANSITIONS.items()}
    assert set(MESSAGE_TYPES) == WORK | HANDSHAKE | {"drain"}
    assert LINK_ERROR in TEXT
    assert {state.value for state in LinkState} == {key[0] for key in spelled} | {"closed"}


def test_every_limit_has_its_value():
    """Names and numbers of the page are the code's, and no limit of the frames is left out."""
    named = {row[0].strip("`"): int(row[1]) for row in table("limit")}
    frame_limits = dataclasses.asdict(DEFAULT_LIMITS)
    for name, value in named.items():
        owners = [
            getattr(module, name)
            for module in (frame, fields, messages, link_state, websocket)
            if hasattr(module, name)
        ]
        assert value == (frame_limits[name] if name in frame_limits else owners[0])
    assert set(frame_limits) <= set(named)


def test_every_code_and_reason_is_explained():
    """Frame errors and miss reasons are the code's own lists."""
    assert set(first_cells("frame error")) == FRAME_CODES | {"not_binary"}
    assert tuple(first_cells("miss reason")) == CACHE_MISS_REASONS
    assert set(re.findall(r"`(\w+)`", TEXT.partition("Element types:")[2].partition(".\n")[0])) == set(ITEM_BYTES)


def codes_raised(package: str, error: str) -> Iterator[tuple[str, str]]:
    """Each literal code given to an error's constructor in a package, with the file that does."""
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == error:
                codes = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "code")]
                for code in codes:
                    if isinstance(code, ast.Constant) and isinstance(code.value, str):
                        yield code.value, path.name


@pytest.mark.parametrize(
    ("package", "error", "column"),
    [
        ("shard", "StepFailed", "step error"),
        ("shard", "Refused", "refused code"),
        ("shared", "Refused", "refused code"),
    ],
)
def test_every_code_that_a_node_answers_is_explained(package: str, error: str, column: str):
    """A code on the wire that the page does not know is a code no other implementation can handle."""
    assert {item for item in codes_raised(package, error) if item[0] not in first_cells(column)} == set()


@pytest.mark.parametrize("example", re.findall(r"```json\n(.*?)\n```", TEXT, re.DOTALL))
def test_every_json_example_is_a_message(example: str):
    """Each example reads as a message and is written back as it stands, but for spaces and the order of fields."""
    header = orjson.loads(example)
    assert encode_header(decode_header(header)) == header


def test_the_hexdump_is_the_frame_it_shows():
    """The bytes decode, and encoding what they hold gives the same bytes."""
    dump = TEXT.partition("```hexdump\n")[2].partition("```")[0]
    rows = [line.split("  ") for line in dump.splitlines()]
    data = bytes.fromhex("".join(row[1] for row in rows))
    decoded = decode_frame(data)
    message = decode_header(decoded.header)
    assert b"".join(encode_frame(encode_header(message), decoded.tensors)) == data
    assert decoded.tensors["hidden_states"].shape == (1, 1, 4)
    for offset, row in enumerate(rows):
        chunk = data[16 * offset : 16 * (offset + 1)]
        assert int(row[0], 16) == 16 * offset
        assert row[-1] == "".join(chr(byte) if 32 <= byte < 127 else "." for byte in chunk)


def test_every_link_leads_somewhere():
    """Files that the page names exist."""
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (PAGE.parent / target).exists(), target
