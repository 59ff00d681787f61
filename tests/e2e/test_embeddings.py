"""Embeddings of a whole installation: real vectors on every surface, on the books."""

from __future__ import annotations

import json
import math
import urllib.request
from typing import Any

import pytest

from tests.support.installation import EMBEDDINGS, Installation
from tests.support.settled import settled_usage

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.slow]

TEXTS = ["A man is eating.", "A man eats a meal.", "The stock market fell sharply today."]


def post(installation: Installation, path: str, body: Any) -> Any:
    account = installation.account
    request = urllib.request.Request(
        f"{installation.url}{path.format(account=account.account_id)}",
        data=json.dumps(body).encode(),
        headers={"authorization": f"Bearer {account.api_token}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def cosine(one: list[float], other: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def test_vectors_mean_something_and_are_the_same_on_all_surfaces(installation: Installation) -> None:
    native = post(
        installation, "/client/v4/accounts/{account}/ai/run/@cf/baai/bge-small-en-v1.5", {"text": TEXTS}
    )
    assert native["success"] is True
    assert native["result"]["shape"] == [3, 384]
    eating, meal, market = native["result"]["data"]
    assert cosine(eating, meal) > 0.7
    assert abs(cosine(eating, market)) < 0.2
    plain = post(installation, "/v1/embeddings", {"model": EMBEDDINGS, "input": TEXTS})
    for entry, vector in zip(plain["data"], native["result"]["data"], strict=True):
        assert entry["embedding"] == pytest.approx(vector, abs=1e-5)
    assert plain["model"] == EMBEDDINGS
    assert plain["usage"] == native["result"]["usage"]
    rows = settled_usage(installation, "--by", "model")["rows"]
    (row,) = (row for row in rows if row["key"] == EMBEDDINGS)
    assert row["num_requests"] == 2
    assert row["prompt_tokens"] == 2 * plain["usage"]["prompt_tokens"]
    assert row["completion_tokens"] == 0
    assert row["amount_nanos"] > 0
