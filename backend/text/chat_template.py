"""A conversation becomes the prompt text that the model was trained on.

Text of users can never become a special token. Before rendering, a *guard* (a Unicode noncharacter that
occurs nowhere in the conversation) is put inside every special spelling found in the conversation, so that
only spellings that the template itself wrote are whole afterwards; the tokenizer takes the guard out again
when it encodes. Spellings that would only form across the edge of a string are guarded as well.

The same messages always give the same text, and messages added at the end leave the text before them as it
was (as far as the model's own template does), so that the prefix cache finds it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2.nodes import Node
from jinja2.parser import Parser

from backend.text.messages import BadMessageError, normalise_messages

# The noncharacters U+FDD0..U+FDEF are for internal use by definition; no font, keyboard or vocabulary has
# them.
_GUARDS: Final = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


class BadTemplateError(ValueError):
    """The checkpoint's chat template is missing or is not valid Jinja."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Prompt text, and the guard in it ("" when no user text had to be guarded)."""

    text: str
    guard: str = ""


class ChatTemplate:
    """One model's template, compiled once; rendering is pure and thread-safe.

    Args:
        source: the Jinja text.
        special_spellings: spellings of the tokenizer's special tokens.
        variables: spellings that the template may name (``bos_token``, ``eos_token``, ...).
    """

    def __init__(
        self, source: str, special_spellings: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise BadTemplateError(f"chat template, line {error.lineno}: {error.message}") from error
        self._variables = dict(variables or {})
        self._spellings = _Spellings(special_spellings)
        # A template that knows the newer role keeps it; for all others it is the system's.
        self._developer_role = "developer" if "developer" in source else "system"

    @classmethod
    def from_directory(cls, directory: Path, special_spellings: Sequence[str]) -> ChatTemplate:
        """Read ``chat_template.jinja``, or else ``chat_template`` of ``tokenizer_config.json``.

        Raises:
            BadTemplateError: when the checkpoint has none.
        """
        config: dict[str, Any] = {}
        config_path = directory / "tokenizer_config.json"
        if config_path.exists():
            config = json.loads(config_path.read_bytes())
        template_path = directory / "chat_template.jinja"
        if template_path.exists():
            config["chat_template"] = template_path.read_text("utf-8")
        return cls.from_config(config, special_spellings, f"{directory}: chat_template.jinja")

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], special_spellings: Sequence[str], where: str
    ) -> ChatTemplate:
        """Take template and special spellings out of the content of a ``tokenizer_config.json``.

        Raises:
            BadTemplateError: when there is no template; it says ``where`` one was looked for.
        """
        source = _template_of(config)
        if source is None:
            raise BadTemplateError(f"{where}: the chat template is missing")
        return cls(source, special_spellings, _special_variables(config))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> RenderedPrompt:
        """Render a conversation.

        Args:
            messages: OpenAI-form messages, as received.
            tools: tool declarations; an empty list is no tools.
            options: the request's ``chat_template_kwargs``.

        Raises:
            BadMessageError: when a message cannot be rendered; it names the field.
        """
        conversation: dict[str, Any] = {
            **(options or {}),
            "messages": normalise_messages(messages, developer_role=self._developer_role),
            "tools": list(tools) or None,
        }
        guard = self._choose_guard(conversation)
        if guard:
            conversation = {name: self._guarded(value, guard) for name, value in conversation.items()}
        conversation.update(self._variables)
        conversation.setdefault("documents", None)
        conversation["add_generation_prompt"] = add_generation_prompt
        try:
            return RenderedPrompt(self._template.render(conversation), guard)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            # A template's own raise_exception, or a message of a form that it does not know.
            raise BadMessageError(
                "messages", f"the chat template refused the conversation: {error}"
            ) from error

    def _choose_guard(self, conversation: Mapping[str, Any]) -> str:
        """A character to break special spellings with, or "" when there is none to break."""
        if not any(self._spellings.endanger(text) for text in _strings(conversation)):
            return ""
        used = set().union(*(set(text) for text in _strings(conversation)))
        for guard in _GUARDS:
            if guard not in used:
                return guard
        raise BadMessageError("messages", "the text uses every Unicode noncharacter from U+FDD0 to U+FDEF")

    def _guarded(self, value: Any, guard: str) -> Any:
        if isinstance(value, str):
            return self._spellings.guarded(value, guard)
        if isinstance(value, Mapping):
            return {self._guarded(key, guard): self._guarded(item, guard) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded(item, guard) for item in value]
        return value


class _Spellings:
    """The spellings of special tokens: whole ones inside a text, and parts of one at its edges.

    The end of a spelling at the start of a text, or the beginning of one at its end, could be made whole by
    what the template writes beside it.
    """

    def __init__(self, spellings: Sequence[str]) -> None:
        by_length = sorted(spellings, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, by_length)) if by_length else r"(?!)")
        self._heads = {spelling[cut:] for spelling in spellings for cut in range(1, len(spelling))}
        self._tails = {spelling[:cut] for spelling in spellings for cut in range(1, len(spelling))}
        self._edge_lengths = range(1, max(map(len, spellings), default=1))

    def endanger(self, text: str) -> bool:
        return bool(self._begins_badly(text) or self._ends_badly(text) or self._whole.search(text))

    def guarded(self, text: str, guard: str) -> str:
        """The text with the guard inside every spelling, and between its edges and what comes beside them."""
        head = guard if self._begins_badly(text) else ""
        tail = guard if self._ends_badly(text) else ""
        return head + self._whole.sub(lambda match: match[0][0] + guard + match[0][1:], text) + tail

    def _begins_badly(self, text: str) -> bool:
        return any(text[:length] in self._heads for length in self._edge_lengths)

    def _ends_badly(self, text: str) -> bool:
        return any(text[-length:] in self._tails for length in self._edge_lengths)


def _strings(value: Any) -> Iterator[str]:
    """Every string inside a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _template_of(config: Mapping[str, Any]) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    return template if isinstance(template, str) else None


def _special_variables(config: Mapping[str, Any]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            variables[name] = value
    return variables


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks what a model is trained on; here it only renders."""

    tags = {"generation"}  # noqa: RUF012 (the form that Jinja asks for)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which no chat template was trained with.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
