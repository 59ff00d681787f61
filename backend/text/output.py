"""From the tokens of one choice to the text that its reader sees; the one pipeline for every surface.

Order: detokenise, hold back stop strings, release. Streams and whole answers both read it, so they cannot
differ. Parsers of reasoning and tool calls have their place behind the stop strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from backend.engine.messages import SequenceFinish, TokenLogprobs, TokenOutput
from backend.text.detokenizer import Detokenizer
from backend.text.stop_strings import StopFilter, StopStrings


class ChoiceText:
    """The text of one choice.

    Log probabilities travel with the text of their token: they are released when the first character of it
    is, so that those of held-back or cut-off text never show.

    Args:
        token_bytes: the bytes of every token id of the vocabulary.
        stops: stop strings, or None.

    Attributes:
        num_tokens: completion tokens consumed; up to the match when a stop string ended the text.
        finish_reason: set once the text is over; "stop" also when a stop string matched.
    """

    __slots__ = (
        "_detokenizer",
        "_filter",
        "_logprobs",
        "_num_decoded",
        "_num_shown",
        "finish_reason",
        "num_tokens",
    )

    def __init__(self, token_bytes: Sequence[bytes], stops: StopStrings | None = None) -> None:
        self._detokenizer = Detokenizer(token_bytes)
        self._filter = StopFilter(stops) if stops is not None else None
        self._logprobs: deque[tuple[int, TokenLogprobs]] = deque()
        self._num_decoded = 0  # characters so far, held-back ones included
        self._num_shown = 0
        self.num_tokens = 0
        self.finish_reason: SequenceFinish | None = None

    def push(self, output: TokenOutput) -> str:
        """Take the next tokens; return the text that they release, often one word, sometimes nothing."""
        shown = ""
        last = len(output.token_ids) - 1
        for index, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            if output.logprobs is not None:
                self._logprobs.append((self._num_decoded, output.logprobs[index]))
            if index == last and output.finish_reason == "stop":
                break  # the stop token itself, which is not text
            shown += self._show(self._detokenizer.push(token_id))
            if self.finish_reason is not None:
                break
        if output.finish_reason is not None and self.finish_reason is None:
            shown += self._end(output.finish_reason)
        self._num_shown += len(shown)
        return shown

    def take_logprobs(self) -> list[TokenLogprobs]:
        """The log probabilities of the text released since the last call."""
        taken: list[TokenLogprobs] = []
        # Tokens without text (an unfinished character at the end) belong to the answer only when it was cut.
        takes_all = self.finish_reason is not None and self.finish_reason != "stop"
        while self._logprobs and (takes_all or self._logprobs[0][0] < self._num_shown):
            taken.append(self._logprobs.popleft()[1])
        return taken

    def _show(self, text: str) -> str:
        self._num_decoded += len(text)
        if self._filter is None or not text:
            return text
        shown = self._filter.push(text)
        if self._filter.matched is not None:
            self.finish_reason = "stop"
        return shown

    def _end(self, reason: SequenceFinish) -> str:
        shown = self._show(self._detokenizer.flush())
        if self.finish_reason is None:
            self.finish_reason = reason
            if self._filter is not None:
                shown += self._filter.flush()
        return shown
