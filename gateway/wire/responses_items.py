"""The items of a response, and the events that tell of them as they grow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec


class Events:
    """Server-sent events on their way to the client, numbered from 0."""

    def __init__(self) -> None:
        self._number = 0
        self._frames: list[bytes] = []

    def add(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        self._frames.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(event)))

    def take(self) -> bytes:
        """What was added since the last time."""
        frames = b"".join(self._frames)
        self._frames.clear()
        return frames


class Item(ABC):
    """One item of the output; told about in ``events`` from :meth:`open` to :meth:`close`."""

    prefix = ""

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self.status = "in_progress"
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        self._events = Events()
        self._place: dict[str, Any] = {}

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def open(self, events: Events, output_index: int) -> None:
        self._events = events
        self._place = {"item_id": self.id, "output_index": output_index}
        events.add("response.output_item.added", output_index=output_index, item=self.as_json())
        self._opened()

    def extend(self, text: str, logprobs: list[Any]) -> None:
        self._texts.append(text)
        self._logprobs += logprobs
        self._extended(text, logprobs)

    def close(self, status: str) -> None:
        if self.status != "in_progress":
            return
        self._closing()
        self.status = status
        self._events.add(
            "response.output_item.done", output_index=self._place["output_index"], item=self.as_json()
        )

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """The item as it is now."""

    def _opened(self) -> None:  # noqa: B027 - most items have nothing more to tell
        """Tell what follows the item itself."""

    @abstractmethod
    def _extended(self, text: str, logprobs: list[Any]) -> None:
        """Tell of a piece of text."""

    @abstractmethod
    def _closing(self) -> None:
        """Tell that the text is complete."""


class MessageItem(Item):
    """What the model says: one part of text."""

    prefix = "msg"

    def as_json(self) -> dict[str, Any]:
        content = [self._part()] if self._texts else []
        return {
            "id": self.id,
            "type": "message",
            "status": self.status,
            "role": "assistant",
            "content": content,
        }

    def _part(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": self._logprobs,
        }

    def _opened(self) -> None:
        self._events.add("response.content_part.added", **self._place, content_index=0, part=self._part())

    def _extended(self, text: str, logprobs: list[Any]) -> None:
        self._events.add(
            "response.output_text.delta", **self._place, content_index=0, delta=text, logprobs=logprobs
        )

    def _closing(self) -> None:
        self._events.add(
            "response.output_text.done",
            **self._place,
            content_index=0,
            text=self.text,
            logprobs=self._logprobs,
        )
        self._events.add("response.content_part.done", **self._place, content_index=0, part=self._part())


class ReasoningItem(Item):
    """What the model thinks, as it is."""

    prefix = "rs"

    def as_json(self) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": self.text}] if self._texts else []
        return {
            "id": self.id,
            "type": "reasoning",
            "status": self.status,
            "summary": [],
            "content": content,
        }

    def _extended(self, text: str, logprobs: list[Any]) -> None:
        self._events.add("response.reasoning_text.delta", **self._place, content_index=0, delta=text)

    def _closing(self) -> None:
        self._events.add("response.reasoning_text.done", **self._place, content_index=0, text=self.text)


class CallItem(Item):
    """A call of a function that the client is to make."""

    prefix = "fc"

    def __init__(self, item_id: str, call_id: str, name: str) -> None:
        super().__init__(item_id)
        self._call_id = call_id
        self._name = name

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
        }

    def _extended(self, text: str, logprobs: list[Any]) -> None:
        self._events.add("response.function_call_arguments.delta", **self._place, delta=text)

    def _closing(self) -> None:
        self._events.add(
            "response.function_call_arguments.done", **self._place, name=self._name, arguments=self.text
        )
