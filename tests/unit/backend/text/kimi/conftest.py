"""The small vocabulary, and the real one where its files are at hand."""

from __future__ import annotations

import pytest

from backend.text.kimi.tokenizer import TiktokenTokenizer
from tests.support.kimi_text import tiny_tokenizer
from tests.support.shared_data import shared_data


@pytest.fixture(scope="session")
def tiny() -> TiktokenTokenizer:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def real() -> TiktokenTokenizer:
    return TiktokenTokenizer.from_directory(shared_data("kimi-tokenizer"), cache_chars=1_000_000)
