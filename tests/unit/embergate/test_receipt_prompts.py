"""Which form a request's body has, told by the body alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from embergate.receipt_prompts import _chat_of
from gateway.errors import Refusal

MODEL = "@cf/test/model"
SAID = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": SAID},
        {"prompt": "hello"},
        {"model": MODEL, "prompt": ["hello"]},
        {"model": MODEL, "input": "hello"},
        {"model": MODEL, "input": SAID, "messages": None},
    ],
    ids=["chat", "prompt", "completion", "response", "response of items"],
)
def test_all_forms_hold_the_same_conversation(body: dict[str, Any]) -> None:
    request = _chat_of(json.dumps(body).encode(), MODEL)
    assert [(said["role"], said["content"]) for said in request.messages] == [("user", "hello")]


def test_what_is_none_of_them_is_refused() -> None:
    for body in (b"no JSON", b"[]", b"{}"):
        with pytest.raises(Refusal):
            _chat_of(body, MODEL)
