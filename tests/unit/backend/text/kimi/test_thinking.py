"""Every way to say that the model should not think, or should see what it thought."""

from __future__ import annotations

from typing import Any

import pytest

from backend.text.kimi.thinking import Thinking, read_thinking
from backend.text.messages import BadMessageError


@pytest.mark.parametrize(
    ("options", "setting", "thinking"),
    [
        ({}, None, Thinking()),
        ({"reasoning_effort": "high"}, None, Thinking()),
        ({"thinking": True, "enable_thinking": True}, {"type": "enabled"}, Thinking()),
        ({"reasoning_effort": "none"}, None, Thinking(is_on=False)),
        ({"thinking": False}, None, Thinking(is_on=False)),
        ({"enable_thinking": False}, None, Thinking(is_on=False)),
        ({"thinking": {"type": "disabled"}}, None, Thinking(is_on=False)),
        ({}, {"type": "disabled"}, Thinking(is_on=False)),
        ({}, False, Thinking(is_on=False)),
        ({"thinking": True, "enable_thinking": False}, None, Thinking(is_on=False)),
        ({"thinking": None, "enable_thinking": None}, None, Thinking()),
        ({"preserve_thinking": True}, None, Thinking(keeps_history=True)),
        ({"clear_thinking": False}, None, Thinking(keeps_history=True)),
        ({"clear_thinking": True}, None, Thinking()),
        ({}, {"type": "enabled", "keep": "all"}, Thinking(keeps_history=True)),
        ({"thinking": {"keep": "all"}}, None, Thinking(keeps_history=True)),
    ],
)
def test_each_spelling(options: dict[str, Any], setting: Any, thinking: Thinking) -> None:
    """Complaint C1."""
    assert read_thinking(options, setting) == thinking


@pytest.mark.parametrize(
    ("options", "setting", "param"),
    [
        ({"thinking": "no"}, None, "chat_template_kwargs.thinking"),
        ({"thinking": {"type": "off"}}, None, "chat_template_kwargs.thinking.type"),
        ({"enable_thinking": "false"}, None, "chat_template_kwargs.enable_thinking"),
        ({"preserve_thinking": 1}, None, "chat_template_kwargs.preserve_thinking"),
        ({}, {"type": "off"}, "thinking.type"),
        ({}, {"keep": "some"}, "thinking.keep"),
        ({}, 7, "thinking"),
    ],
)
def test_a_wrong_value_is_named(options: dict[str, Any], setting: Any, param: str) -> None:
    with pytest.raises(BadMessageError) as caught:
        read_thinking(options, setting)
    assert caught.value.param == param
