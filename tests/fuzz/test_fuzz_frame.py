"""A bounded run of the fuzz target, seeded, without atheris."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from shared.frame import encode_frame
from tests.fuzz.fuzz_frame import TOKENS, check, check_handshake, create_corpus, create_hellos, damage, mutate

MUTANTS_PER_SEED = 2_000


@pytest.mark.parametrize("frame", create_corpus())
def test_the_corpus_itself_holds(frame: bytes):
    """Good frames keep the invariant too, in every state."""
    check(frame)


@pytest.mark.parametrize("seed", range(4))
def test_mutated_frames_keep_the_invariant(seed: int):
    """Thousands of damaged frames; a failure's seed replays it."""
    rng = Random(seed)
    corpus = create_corpus()
    for _ in range(MUTANTS_PER_SEED):
        check(mutate(rng, corpus))


def frame_of(header: dict[str, Any]) -> bytes:
    """A whole frame of this header."""
    return b"".join(encode_frame(header))


def test_whole_hellos_open_with_a_token_alone():
    """So that the tests below have something to damage, and something to catch."""
    opened = [check_handshake(frame_of(header)) for header in create_hellos()]
    assert opened == [True] * len(TOKENS) + [False] * 3


@pytest.mark.parametrize("seed", range(4))
def test_no_damaged_hello_opens_a_link_without_a_token(seed: int):
    """Damage to fields may leave or make a token, and then it opens; nothing else ever does."""
    rng = Random(seed)
    hellos = create_hellos()
    opened = [check_handshake(frame_of(damage(rng, rng.choice(hellos)))) for _ in range(MUTANTS_PER_SEED)]
    assert any(opened)
    assert not all(opened)


@pytest.mark.parametrize("seed", range(4))
def test_no_damaged_bytes_open_a_link_without_a_token(seed: int):
    """The same for bytes, of hellos and of every other message."""
    rng = Random(seed)
    corpus = [*map(frame_of, create_hellos()), *create_corpus()]
    for _ in range(MUTANTS_PER_SEED):
        data = mutate(rng, corpus)
        assert not check_handshake(data) or any(token.encode() in data for token in TOKENS)
