"""Tokens to text as they come: whole characters only, and stop strings found across token boundaries."""

from typing import Any

REPLACEMENT = "\ufffd"
CONTEXT = 6
"""Tokens decoded again before new ones: what surrounds a token may change its text (a leading space, a joined character)."""


class TextStream:
    """The text of a growing token sequence.

    `add(token)` decodes one more token and says whether a stop string is complete; `take()` returns the text that is
    settled since the last call. Text from the first stop string on is cut; text that may still become one is held back,
    until `finish()`.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()):
        self.tokenizer, self.stop = tokenizer, stop
        self.tokens: list[int] = []
        self.text = ""
        self.stopped = False
        self._taken = 0
        self._decoded = 0  # tokens whose text is in `text`

    def add(self, token: int) -> bool:
        self.tokens.append(token)
        self._decode(final=False)
        return self.stopped

    def finish(self) -> None:
        """No more tokens will come: half a character is shown as what it is."""
        if not self.stopped:
            self._decode(final=True)
        self.stop = ()

    def take(self) -> str:
        end = len(self.text) - (0 if self.stopped else self._held_back())
        new, self._taken = self.text[self._taken : end], max(end, self._taken)
        return new

    def _decode(self, final: bool) -> None:
        start = max(0, self._decoded - CONTEXT)
        before = self._text_of(self.tokens[start : self._decoded])
        after = self._text_of(self.tokens[start:])
        if not after.startswith(before) or (after.endswith(REPLACEMENT) and not final):
            if not final and len(self.tokens) - self._decoded < 4 * CONTEXT:
                return
        new = after[len(before) :]
        searched = max(0, len(self.text) - max((len(s) - 1 for s in self.stop), default=0))
        self.text += new
        self._decoded = len(self.tokens)
        found = [at for s in self.stop if (at := self.text.find(s, searched)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _text_of(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _held_back(self) -> int:
        """Length of the longest tail that begins a stop string."""
        return max((n for s in self.stop for n in range(1, len(s)) if self.text.endswith(s[:n])), default=0)
