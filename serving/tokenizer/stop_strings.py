"""Stop strings in a stream of text, without ever showing part of one.

Every stop string has a Knuth-Morris-Pratt automaton, whose state is how many of its first characters the text ends
with. The largest state is how much text must be held back; a full state is a match. Linear in the text, whatever
pieces it comes in.
"""

from collections.abc import Sequence


def failure_links(pattern: str) -> list[int]:
    """links[n]: the longest proper prefix of pattern[:n] that also ends it."""
    links = [0, 0]
    k = 0
    for letter in pattern[1:]:
        while k and pattern[k] != letter:
            k = links[k]
        k += pattern[k] == letter
        links.append(k)
    return links


class StopStringMatcher:
    """Feed text to `add`; what it returns may be shown. Once `stop` is set, the text has ended.

    The match is the one that ends first; of those that end together, the longest.
    stop: the stop string found, or None.
    length: characters of the final text so far, held back ones not counted. After a match: where the text is cut.
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        """`include` keeps the stop string in the text. Empty stop strings are the caller's mistake."""
        assert all(stops), "an empty stop string matches everywhere"
        self.stop: str | None = None
        self.length = 0
        self._include = include
        # Longest first, so that the first full automaton is the longest match.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._links = [failure_links(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""

    def add(self, text: str) -> str:
        """The text that is now safe to show. Nothing may be added after a match."""
        assert self.stop is None, "text after a stop string"
        if not self._stops:
            return self._show(text)
        for position, letter in enumerate(text):
            stop = self._step(letter)
            if stop is not None:
                self.stop = stop
                seen = self._held + text[: position + 1]
                self._held = ""
                return self._show(seen if self._include else seen[: len(seen) - len(stop)])
        seen = self._held + text
        held = max(self._states)
        self._held = seen[len(seen) - held :]
        return self._show(seen[: len(seen) - held])

    def pass_by(self, text: str) -> str:
        """Text in which stop strings do not count (before `min_tokens`); a match cannot begin in it either."""
        self._states = [0] * len(self._stops)
        seen, self._held = self._held + text, ""
        return self._show(seen)

    def finish(self) -> str:
        """The text has ended without a match: what was held back."""
        held, self._held = self._held, ""
        return self._show(held)

    def _show(self, text: str) -> str:
        self.length += len(text)
        return text

    def _step(self, letter: str) -> str | None:
        """Moves every automaton by one character; the stop string that is now complete."""
        found = None
        for i, stop in enumerate(self._stops):
            state, links = self._states[i], self._links[i]
            while state and stop[state] != letter:
                state = links[state]
            state += stop[state] == letter
            self._states[i] = state
            if state == len(stop) and found is None:
                found = stop
        return found
