"""Every architecture that transformers maps is served as docs/models.md says, or refused for the reason given there.

`MESHNET_ALL_MODELS=1` tries all of them, which takes minutes; without it one of each mechanism.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import transformers
from structlog.testing import capture_logs

from tests.support.architectures import causal_model_types
from tests.support.models_docs import PAGE, documented_lines, documented_release, render
from tests.support.parity_case import judge

ONE_OF_EACH = (
    "bart",  # an encoder-decoder
    "bloom",  # layers return tuples
    "deepseek_v4",  # compressed caches, several residual streams, ids on every hop
    "dory",  # layers that run twice
    "gemma3n",  # the text part of a larger model, keys and values shared, the embedding on every hop
    "glm_moe_dsa",  # what one layer chose is used by the next
    "mllama",  # layers that do not run without images
    "nemotron_h",  # attributes that the model reads of its layers
    "roberta",  # positions counted from the ids, a bias tied to the head's
    "zamba2",  # weights shared between layers, state and attention in one slot
)
MODEL_TYPES = causal_model_types() if os.environ.get("MESHNET_ALL_MODELS") == "1" else list(ONE_OF_EACH)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_an_architecture_is_what_the_page_says(model_type: str, tmp_path: Path) -> None:
    """Its logits are the whole's, at every cut; what is refused is refused from the config alone."""
    with capture_logs():
        line = judge(model_type, tmp_path).as_line()
    if transformers.__version__ == documented_release():
        assert line == documented_lines()[model_type], "stale: run `make models`"


@pytest.mark.skipif(transformers.__version__ != documented_release(), reason="docs/models.md is of another release")
def test_the_page_lists_every_architecture() -> None:
    """In the library's order, and what it says of them all is counted from its own table."""
    lines = documented_lines()
    assert list(lines) == causal_model_types()
    assert render(lines.values()) == PAGE.read_text(encoding="utf-8")
