"""One model's tokenizer and chat template, over a Hugging Face tokenizer (transformers 5)."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError

from ..errors import BadRequest, ContextTooLong
from .long_text import PIECE, LongText
from .token_bound import characters_per_token
from .turns import Turns

OTHER_USER = "\N{SOFT HYPHEN}"
"""A message that begins like nobody's."""


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the common beginning of two texts, or of two lists of tokens."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class Rendered:
    """A rendered prompt: its text, its tokens, and the token counts at message ends."""

    text: str
    tokens: list[int]
    checkpoints: tuple[int, ...]


class HFTokenizer:
    """Encode, decode and render. Safe from any thread.

    `backend` is a transformers tokenizer (of a processor: the nested one); `renderer` is what
    has `apply_chat_template`, where that is another object (mlx-lm's wrapper with a template
    written in Python).
    """

    def __init__(self, backend: Any, renderer: Any = None) -> None:
        self._backend = backend
        self._renderer = backend if renderer is None else renderer
        # a fast tokenizer must not be used by two threads at once: "Already borrowed"
        self._lock = Turns()
        self._context: int | None = None

    def within(self, context_length: int) -> HFTokenizer:
        """The same tokenizer; texts that have more tokens than this raise `ContextTooLong`."""
        bounded = copy.copy(self)
        bounded._context = context_length
        return bounded

    @property
    def fast(self) -> Any:
        """The `tokenizers.Tokenizer`."""
        return self._backend.backend_tokenizer

    @property
    def backend(self) -> Any:
        """The transformers tokenizer."""
        return self._backend

    @property
    def chat_template(self) -> str | None:
        """The template's source, where it is one text."""
        template = getattr(self._backend, "chat_template", None)
        return template if isinstance(template, str) else None

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids. Raises `ContextTooLong` as soon as more are certain than `within` allows."""
        if len(text) <= PIECE:
            return self._encode(text, special=special)
        self._refuse_by_length(text)
        around = self._added(special)
        if around is None:
            return self._encode(text, special=special)
        tokens = around[0]
        for _, piece in self._long.pieces(text):
            tokens += self._encode(piece, special=False)
            self._check(len(tokens))
        return tokens + around[1]

    def _added(self, special: bool) -> tuple[list[int], list[int]] | None:
        """Tokens put before and after every text; `None`: that cannot be told."""
        bare, whole = (self._encode("a", special=each) for each in (False, special))
        for at in range(len(whole) - len(bare) + 1):
            if whole[at : at + len(bare)] == bare:
                return whole[:at], whole[at + len(bare) :]
        return None

    def _encode(self, text: str, *, special: bool) -> list[int]:
        with self._lock:
            return list(self._backend.encode(text, add_special_tokens=special))

    def _refuse_by_length(self, text: str) -> None:
        if self._context is not None and len(text) > self._context:
            most = self._most_characters
            self._check(0 if most is None else len(text) // most)

    def _check(self, at_least: int) -> None:
        if self._context is not None and at_least >= self._context:
            raise ContextTooLong.of(at_least, self._context, "at least ")

    @cached_property
    def _most_characters(self) -> int | None:
        return characters_per_token(self.fast)

    @cached_property
    def _long(self) -> LongText:
        return LongText(self.fast, self._encode)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        with self._lock:
            return str(self._backend.decode(list(tokens), skip_special_tokens=skip_special))

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        """Tokens without any special ones added, and the character where each begins.

        Raises as `encode` does.
        """
        tokens: list[int] = []
        starts: list[int] = []
        self._refuse_by_length(text)
        for begin, piece in self._long.pieces(text):
            with self._lock:
                encoding = self._backend(
                    piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False
                )
            tokens += encoding["input_ids"]
            starts += [begin + start for start, _ in encoding["offset_mapping"]]
            if len(text) > PIECE:
                self._check(len(tokens))
        return tokens, starts

    def apply_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        generation_prompt: bool = True,
    ) -> str:
        """The chat template's text. Raises `BadRequest` with the template's own complaint."""
        try:
            text = self._renderer.apply_chat_template(
                [dict(m) for m in messages],
                tools=[dict(t) for t in tools] or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **variables,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise BadRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return str(text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> Rendered:
        """Render and tokenise; checkpoints at the ends of the first two messages and the last."""
        text = self.apply_template(messages, tools, variables)
        tokens, starts = self.encode_with_offsets(text)
        prefixes = self._prefixes(messages, tools, variables)
        prefixes.append(self.system_part(messages, tools, variables, text))
        ends = (len(prefix) for prefix in prefixes if text.startswith(prefix))
        counts = {bisect_left(starts, end) for end in ends}
        return Rendered(text, tokens, tuple(sorted(c for c in counts if 0 < c < len(tokens))))

    def system_part(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        text: str,
    ) -> str:
        """What a prompt's text has in common with that of another user; "" without a system part.

        Some templates (Gemma's) write the system part into the user's message, which has then
        no end of its own.
        """
        if len(messages) < 2 or messages[0]["role"] != "system":
            return ""
        other = [messages[0], {"role": "user", "content": OTHER_USER}]
        try:
            return text[: common_length(text, self.apply_template(other, tools, variables))]
        except BadRequest:
            return ""

    def _prefixes(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> list[str]:
        """Texts that a later prompt may begin with: its first messages, all but the reply."""
        found = []
        for cut in sorted({min(1, len(messages)), min(2, len(messages)), len(messages)}):
            try:
                found.append(
                    self.apply_template(messages[:cut], tools, variables, generation_prompt=False)
                )
            except BadRequest:
                continue  # a template may refuse a conversation without a user message
        return found
