"""From the tokens of one choice to what its reader sees; the one pipeline for every surface.

Order: detokenise, hold back stop strings, read reasoning and tool calls, release. Streams and whole answers
both read it, so they cannot differ. A model without marks of its own has no parser: its text is its answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from backend.engine.messages import SequenceFinish, TokenLogprobs, TokenOutput
from backend.text.detokenizer import Detokenizer
from backend.text.parts import OutputParser, Part
from backend.text.stop_strings import StopFilter, StopStrings
from backend.wire import FinishReason


class ChoiceText:
    """The text of one choice.

    Log probabilities travel with the text of their token: they are released when the first character of it
    is, so that those of held-back or cut-off text never show.

    Args:
        token_bytes: the bytes of every token id of the vocabulary.
        stops: stop strings, or None.
        parser: this choice's own, or None. With one, text comes out as parts, see :meth:`take_parts`.

    Attributes:
        num_tokens: completion tokens consumed; up to the match when a stop string ended the text.
        finish_reason: set once the text is over; "stop" also when a stop string matched, "tool_calls" when it
            came to its end with at least one call.
    """

    __slots__ = (
        "_detokenizer",
        "_feed",
        "_filter",
        "_is_cut",
        "_logprobs",
        "_num_decoded",
        "_num_shown",
        "finish_reason",
        "num_tokens",
    )

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        stops: StopStrings | None = None,
        parser: OutputParser | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(token_bytes)
        self._filter = StopFilter(stops) if stops is not None else None
        self._feed = _ParserFeed(parser) if parser is not None else None
        self._logprobs: deque[tuple[int, TokenLogprobs]] = deque()
        self._num_decoded = 0  # characters so far, held-back ones included
        self._num_shown = 0
        self._is_cut = False
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        """How many of the tokens were reasoning."""
        return 0 if self._feed is None else self._feed.parser.num_reasoning_tokens

    def push(self, output: TokenOutput) -> str:
        """Take the next tokens; return the text that they release, often one word, sometimes nothing.

        With a parser it is always nothing: :meth:`take_parts` has it.
        """
        shown = ""
        last = len(output.token_ids) - 1
        for index, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            if output.logprobs is not None:
                self._logprobs.append((self._num_decoded, output.logprobs[index]))
            if index == last and output.finish_reason == "stop" and not output.is_last_text:
                break  # the stop token itself, which is not text
            shown += self._take(token_id) if self._feed is None else self._parse(self._feed, token_id)
            if self.finish_reason is not None:
                break
        if output.finish_reason is not None and self.finish_reason is None:
            shown += self._end(output.finish_reason)
        self._num_shown += len(shown)
        if self._feed is None:
            return shown
        if self.finish_reason is not None:
            self.finish_reason = self._feed.finish(self.finish_reason)
        return ""

    def take_parts(self) -> list[Part]:
        """What the parser has found since the last call."""
        return [] if self._feed is None else self._feed.parser.take_parts()

    def take_logprobs(self) -> list[TokenLogprobs]:
        """The log probabilities of the text released since the last call."""
        taken: list[TokenLogprobs] = []
        # Tokens without text (an unfinished character at the end) belong to the answer only when it was cut.
        while self._logprobs and (self._is_cut or self._logprobs[0][0] < self._num_shown):
            taken.append(self._logprobs.popleft()[1])
        return taken

    def _take(self, token_id: int) -> str:
        return self._show(self._detokenizer.push(token_id))

    def _parse(self, feed: _ParserFeed, token_id: int) -> str:
        shown = ""
        if feed.parser.is_mark(token_id):
            # An unfinished character ends here; what becomes of it is no part of the mark.
            shown = self._give(feed, None, self._detokenizer.flush())
        if self.finish_reason is None:
            shown += self._give(feed, token_id, self._detokenizer.push(token_id))
        if feed.parser.is_over and self.finish_reason is None:
            self.finish_reason = "stop"
        return shown

    def _give(self, feed: _ParserFeed, token_id: int | None, text: str) -> str:
        feed.expect(token_id, len(text))
        shown = self._show(text)
        feed.release(shown)
        return shown

    def _show(self, text: str) -> str:
        self._num_decoded += len(text)
        if self._filter is None or not text:
            return text
        shown = self._filter.push(text)
        if self._filter.matched is not None:
            self.finish_reason = "stop"
        return shown

    def _end(self, reason: SequenceFinish) -> str:
        text = self._detokenizer.flush()
        shown = self._show(text) if self._feed is None else self._give(self._feed, None, text)
        if self.finish_reason is None:
            self.finish_reason = reason
            self._is_cut = reason != "stop"
            if self._filter is not None:
                held = self._filter.flush()
                shown += held
                if self._feed is not None:
                    self._feed.release(held)
        return shown


class _ParserFeed:
    """Hands tokens to a parser in step with the release of their text.

    Stop strings look at characters and hold some back, parsers look at tokens: a token is fed as its
    characters are released, in pieces when they are, but a mark only as a whole.
    """

    __slots__ = ("_expected", "_released", "parser")

    def __init__(self, parser: OutputParser) -> None:
        self.parser = parser
        self._expected: deque[_Expected] = deque()
        self._released = ""

    def expect(self, token_id: int | None, num_chars: int) -> None:
        """Text of so many characters is on its way; ``token_id`` None: it belongs to the token before."""
        if token_id is not None or num_chars:
            self._expected.append(_Expected(token_id, num_chars))

    def release(self, text: str) -> None:
        """So much of the expected text may be read."""
        self._released += text
        while self._expected:
            item = self._expected[0]
            if not item.is_counted:
                self._count(item)
            token_id = _NO_TOKEN if item.token_id is None else item.token_id
            available = len(self._released)
            if available < item.num_chars and (not available or self.parser.is_mark(token_id)):
                return
            size = min(available, item.num_chars)
            self.parser.feed(token_id, self._released[:size])
            self._released = self._released[size:]
            item.num_chars -= size
            if item.num_chars:
                return
            self._expected.popleft()

    def finish(self, reason: FinishReason) -> FinishReason:
        """The text is over: what was not released never will be. Returns how the answer ended."""
        for item in self._expected:
            if not item.is_counted:
                self._count(item)
            if item.token_id is not None and self.parser.is_mark(item.token_id):
                break  # what stands behind it is something else, of which nothing was read
        self._expected.clear()
        self.parser.finish("stop" if reason == "tool_calls" else reason)
        if self.parser.num_calls and reason in ("stop", "length"):
            return "tool_calls"
        return reason

    def _count(self, item: _Expected) -> None:
        item.is_counted = True
        if item.token_id is not None:
            self.parser.count(item.token_id)


class _Expected:
    __slots__ = ("is_counted", "num_chars", "token_id")

    def __init__(self, token_id: int | None, num_chars: int) -> None:
        self.token_id = token_id
        self.num_chars = num_chars
        self.is_counted = False


# The id of text that has no token of its own; no vocabulary has it.
_NO_TOKEN = -1
