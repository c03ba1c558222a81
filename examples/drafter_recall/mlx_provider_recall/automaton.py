"""Every run of tokens that stood in any of many texts, and what followed it how often.

A suffix automaton (Blumer et al., 1985) over several texts that grow at the same time. A state
stands for runs that end at the same places; its link leads to the longest shorter run that also
stands elsewhere. A text costs about as many steps as it has tokens, however long it is.
"""

from collections.abc import Iterator

EMPTY = 0
"""The state of the run of no tokens, with which each text begins."""
COUNTED = 32
"""Shorter and shorter runs that a new token is counted for: drafts come of long ones."""


class Automaton:
    """States are numbers; a text is known by the state of all of it."""

    def __init__(self) -> None:
        self.tokens = 0
        """Appended so far."""
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        """Of the longest run that a state stands for."""
        self._seen = [0]
        """How often it stood anywhere."""

    def append(self, text: int, token: int) -> int:
        """The state of `text` with a token behind it."""
        known = self._next[text].get(token)
        if known is None:
            found = self._grow(text, token)
        else:
            found = self._exactly(text, token, known)
        self.tokens += 1
        for state in self._shorter(found):
            self._seen[state] += 1
        return found

    def before(self, text: int, least: int) -> int | None:
        """The longest run of at least so many tokens that ends the text and was followed by
        something elsewhere."""
        state = text
        while state != EMPTY and self._length[state] >= least:
            if self._next[state]:
                return state
            state = self._link[state]
        return None

    def likeliest(self, state: int) -> tuple[int, int, float]:
        """What mostly followed a run: the token, the state behind it, and its share."""
        seen = self._seen
        after = self._next[state]
        token = max(after, key=lambda each: seen[after[each]])
        return token, after[token], seen[after[token]] / sum(seen[each] for each in after.values())

    def _grow(self, text: int, token: int) -> int:
        """Nowhere did the token follow all of the text."""
        found = self._state(self._length[text] + 1)
        state = text
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = found
            state = self._link[state]
        if state >= 0:
            self._link[found] = self._exactly(state, token, self._next[state][token])
        return found

    def _exactly(self, state: int, token: int, known: int) -> int:
        """The state whose longest run is that of `state` with the token; `known` has it, and may
        have longer ones as well."""
        if self._length[known] == self._length[state] + 1:
            return known
        apart = self._state(self._length[state] + 1)
        self._next[apart] = dict(self._next[known])
        self._seen[apart] = self._seen[known]
        self._link[apart] = self._link[known]
        self._link[known] = apart
        while state >= 0 and self._next[state].get(token) == known:
            self._next[state][token] = apart
            state = self._link[state]
        return apart

    def _state(self, length: int) -> int:
        self._next.append({})
        self._link.append(EMPTY)
        self._length.append(length)
        self._seen.append(0)
        return len(self._next) - 1

    def _shorter(self, state: int) -> Iterator[int]:
        for _ in range(COUNTED):
            if state == EMPTY:
                return
            yield state
            state = self._link[state]
