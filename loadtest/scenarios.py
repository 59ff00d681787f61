"""What users of an installation do: five kinds of conversation, known by their class names.

A talk gives the body of its next request, hears the answer, and is over after some turns. It knows nothing of
how requests are sent, so that any client can hold it.
"""

from __future__ import annotations

import base64
import io
import random
from typing import Any, Protocol

from loadtest.conversation import Answer, Conversation
from loadtest.replay.words import WORDS

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find lines of code that match a pattern.",
            "parameters": {
                "type": "object",
                "properties": {"pattern": {"type": "string"}, "folder": {"type": "string"}},
                "required": ["pattern"],
            },
        },
    }
]
_CHAT_SYSTEM = "You are a friendly assistant. Answer in one or two short sentences."
_SUMMARY_SYSTEM = (
    "You summarise documents for a busy reader. Say what it is about, who does what, and what remains open, "
    "in three short sentences. Do not judge, do not add anything, keep names and figures as they are."
)


class Talk(Protocol):
    """One conversation. ``turn`` counts answers that were heard."""

    @property
    def affinity(self) -> str: ...

    @property
    def turn(self) -> int: ...

    @property
    def is_over(self) -> bool: ...

    def body(self) -> dict[str, Any]:
        """The next request, without model and limits."""
        ...

    def hear(self, answer: Answer) -> None:
        """Go on after an answer."""
        ...


class AgentTalk:
    """A coding agent: a long system prompt, then results of tools that make the conversation grow."""

    def __init__(self, seed: int, num_turns: int) -> None:
        self._conversation = Conversation(seed, num_turns)
        self.affinity = self._conversation.affinity

    @property
    def turn(self) -> int:
        return self._conversation.turn

    @property
    def is_over(self) -> bool:
        return self._conversation.is_over

    def body(self) -> dict[str, Any]:
        return {"messages": self._conversation.messages}

    def hear(self, answer: Answer) -> None:
        self._conversation.hear(answer.text)


class _Messages:
    """A conversation of messages of its own."""

    def __init__(self, kind: str, seed: int, num_turns: int) -> None:
        self._random = random.Random(seed)
        self._num_turns = num_turns
        self.affinity = f"{kind}_{seed:016x}"
        self.turn = 0
        self.messages: list[dict[str, Any]] = []

    @property
    def is_over(self) -> bool:
        return self.turn >= self._num_turns

    def body(self) -> dict[str, Any]:
        return {"messages": self.messages}

    def _words(self, low: int, high: int) -> str:
        return " ".join(self._random.choices(WORDS, k=self._random.randint(low, high)))


class ChatTalk(_Messages):
    """A person who chats: short questions."""

    def __init__(self, seed: int, num_turns: int) -> None:
        super().__init__("chat", seed, num_turns)
        self.messages = [{"role": "system", "content": _CHAT_SYSTEM}]
        self._ask()

    def hear(self, answer: Answer) -> None:
        self.turn += 1
        self.messages.append({"role": "assistant", "content": answer.text})
        self._ask()

    def _ask(self) -> None:
        self.messages.append({"role": "user", "content": f"What do you think of {self._words(3, 20)}?"})


class SummaryTalk(_Messages):
    """A nightly job: one document after the other below the same instructions, no conversation."""

    def __init__(self, seed: int, num_turns: int) -> None:
        super().__init__("summary", seed, 1)
        self.messages = [
            {"role": "system", "content": _SUMMARY_SYSTEM},
            {"role": "user", "content": f"The document:\n{self._words(150, 400)}"},
        ]

    def hear(self, answer: Answer) -> None:
        self.turn += 1


class ToolTalk(_Messages):
    """A loop of tool calls. What the model does not call itself is called for it, so that any model's
    conversation takes the same form.
    """

    def __init__(self, seed: int, num_turns: int) -> None:
        super().__init__("tools", seed, num_turns)
        self.messages = [{"role": "user", "content": f"Find every use of {self._words(1, 2)} in the code."}]

    def body(self) -> dict[str, Any]:
        return {"messages": self.messages, "tools": _TOOLS}

    def hear(self, answer: Answer) -> None:
        self.turn += 1
        call_id = f"call_{self.turn}"
        arguments = f'{{"pattern": "{self._words(1, 1)}", "folder": "src"}}'
        call = {"id": call_id, "type": "function", "function": {"name": "search", "arguments": arguments}}
        self.messages.append({"role": "assistant", "content": answer.text, "tool_calls": [call]})
        found = "\n".join(f"src/{self._words(1, 1)}.py: {self._words(3, 8)}" for _ in range(4))
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": found})


class ImageTalk(_Messages):
    """Questions about a picture; only for models that see."""

    def __init__(self, seed: int, num_turns: int) -> None:
        super().__init__("image", seed, num_turns)
        picture = {"type": "image_url", "image_url": {"url": _picture(self._random)}}
        question = {"type": "text", "text": "What colour is this?"}
        self.messages = [{"role": "user", "content": [picture, question]}]

    def hear(self, answer: Answer) -> None:
        self.turn += 1
        self.messages.append({"role": "assistant", "content": answer.text})
        self.messages.append({"role": "user", "content": f"And what of {self._words(1, 3)}?"})


def _picture(rng: random.Random) -> str:
    """A small picture of one colour, as a data URL."""
    from PIL import Image

    buffer = io.BytesIO()
    colour = (rng.randrange(256), rng.randrange(256), rng.randrange(256))
    Image.new("RGB", (56, 56), colour).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
