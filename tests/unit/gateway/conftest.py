"""Tokenizers, built once per run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.tokenizer import ChatTokenizer, load_tokenizer
from tests.support.text_tokenizers import BUILDERS


@pytest.fixture(scope="session")
def text_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ChatTokenizer]:
    """`text_tokenizer("metaspace")` is a tokenizer of that family."""
    loaded: dict[str, ChatTokenizer] = {}

    def get(kind: str) -> ChatTokenizer:
        if kind not in loaded:
            loaded[kind] = load_tokenizer(BUILDERS[kind](tmp_path_factory.mktemp(kind)))
        return loaded[kind]

    return get
