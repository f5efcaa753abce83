"""A bounded run of the fuzz target, seeded, without atheris."""

from __future__ import annotations

from random import Random

import pytest

from tests.fuzz.fuzz_frame import check, create_corpus, mutate

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
