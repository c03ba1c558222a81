"""Tokens as clients see them in logprobs."""

from __future__ import annotations

from ..protocol.events import TokenLogprob
from ..records import Tokenizer
from .detokenizer import token_bytes
from .execution.decode_batch import Logprob

MAX_NAMES = 50_000
"""Alternatives repeat from step to step."""


class TokenNames:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}

    def described(self, token: int, logprob: Logprob) -> TokenLogprob:
        top = [self._named(other, value) for other, value in logprob.top]
        return self._named(token, logprob.drawn, top)

    def given(self, token: int) -> TokenLogprob:
        """The first token of a prompt, which has no logprob."""
        return self._named(token, None)

    def _named(
        self, token: int, logprob: float | None, top: list[TokenLogprob] | None = None
    ) -> TokenLogprob:
        data = self._bytes.get(token)
        if data is None:
            if len(self._bytes) >= MAX_NAMES:
                self._bytes.clear()
            data = self._bytes[token] = token_bytes(self._tokenizer, token)
        return TokenLogprob(
            token=data.decode(errors="replace"),
            id=token,
            logprob=logprob,
            bytes=list(data),
            top=top or [],
        )
