"""One model's tokenizer and chat template, over a Hugging Face tokenizer (transformers 5)."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError

from ..errors import BadRequest

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
        self._lock = threading.Lock()

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
        with self._lock:
            return list(self._backend.encode(text, add_special_tokens=special))

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        with self._lock:
            return str(self._backend.decode(list(tokens), skip_special_tokens=skip_special))

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        """Tokens without any special ones added, and the character where each begins."""
        with self._lock:
            encoding = self._backend(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        return list(encoding["input_ids"]), [start for start, _ in encoding["offset_mapping"]]

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
