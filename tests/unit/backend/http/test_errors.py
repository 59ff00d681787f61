from __future__ import annotations

from backend.http.errors import context_length_exceeded


def test_the_over_long_error_at_kimis_own_length_is_the_observed_sentence() -> None:
    error = context_length_exceeded(262_144, 199_925, 64_000)
    assert (error.status, error.detail.code, error.detail.type) == (
        400,
        "context_length_exceeded",
        "invalid_request_error",
    )
    assert error.detail.message == (
        "Requested token count exceeds the model's maximum context length of 262144 tokens. You requested a "
        "total of 263925 tokens: 199925 tokens from the input messages and 64000 tokens for the completion. "
        "Please reduce the number of tokens in the input messages or the completion to fit within the limit."
    )
