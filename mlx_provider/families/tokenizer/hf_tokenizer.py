"""One model's tokenizer and chat template, over a Hugging Face tokenizer (transformers 5)."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ...byte_gate import ByteGate
from ...errors import BadRequest, ContextTooLong, UnsupportedModel
from ...records import LoadOptions, Prompt, TemplateForm
from ..checkpoint import read_json
from .control_tokens import ControlTokens
from .long_text import PIECE, LongText
from .spelling import Encoded, Hidden, Messages, Variables, encode_spelled, hide
from .template import TemplateLimit, TemplateRenderer, fit_messages, try_render
from .template_probe import ASKED, template_form

OTHER_USER = "\N{SOFT HYPHEN}"
"""The beginning of a message that no real message shares."""
NO_TOOLS = "the chat template shows no tools: a system message describes them"
NO_TEXT_BESIDE_CALLS = (
    "the chat template has no place for text beside tool calls: it is left out of the history"
)
REFUSES = "the chat template renders no message"
NO_CALLS = "the chat template takes no tool calls or results: they are written as text"


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Number of items before the first difference."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


class HFTokenizer:
    """Encode, decode and render. Safe from any thread. No text of a client becomes a control token:
    `hide_and_render` replaces one character of each control token in the client's texts by a
    private *mark*, so neither template nor tokenizer sees the token; `encode_hidden` encodes the
    original text as letters. If the template loses a mark, the character becomes `\\uXXXX` instead.

    `backend`: a transformers tokenizer (of a processor: the nested one). `renderer`: an object with
    `apply_chat_template`, if the template is trusted Python code (mlx-lm's); a template that is
    text is rendered in a limited process. `reserved`: texts that no client may produce by typing,
    besides the control tokens."""

    def __init__(self, backend: Any, renderer: Any = None, reserved: Sequence[str] = ()) -> None:
        self.backend = backend
        self._renderer = renderer
        self._reserved = tuple(reserved)
        # two threads must not use a fast tokenizer at once ("Already borrowed"); the gate is fair
        self._one_at_a_time = ByteGate(1)
        self.context: int | None = None

    def within(self, context_length: int) -> HFTokenizer:
        """A tokenizer that raises `ContextTooLong` as soon as the context has no token left for a
        reply, in texts of more than `PIECE` characters. The caller checks shorter texts."""
        bounded = copy.copy(self)
        bounded.context = context_length
        return bounded

    def reserving(self, texts: Sequence[str]) -> HFTokenizer:
        """A tokenizer over the same backend (and gate) with further reserved texts."""
        other = HFTokenizer(self.backend, self._renderer, (*self._reserved, *texts))
        other._one_at_a_time, other.context = self._one_at_a_time, self.context
        return other

    @property
    def fast(self) -> Any:
        """The `tokenizers.Tokenizer` behind it."""
        return self.backend.backend_tokenizer

    @property
    def chat_template(self) -> str | None:
        """Its source; if there are several, of the one for tools. `None`: none, or Python code."""
        return self._source([{}])

    @cached_property
    def form(self) -> TemplateForm:
        """What the chat template demands. Raises `UnsupportedModel` if it exceeds its limits."""
        if self._renderer is None and self._source([]) is None:
            return TemplateForm()
        return template_form(partial(self.apply_template, variables={}, probe=True))

    @cached_property
    def control(self) -> ControlTokens:
        return ControlTokens(self.fast, self.chat_template, self._reserved)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What the chat template cannot do, for the operator."""
        form = self.form
        if refusal := self._refusal():
            return (f"{REFUSES}: {refusal}",)
        found = (
            (NO_TOOLS, form.shows_tools == "never"),
            (NO_CALLS, not form.takes_calls),
            (NO_TEXT_BESIDE_CALLS, form.text_with_calls == "dropped"),
        )
        return tuple(note for note, applies in found if applies)

    def _refusal(self) -> str:
        """Why the template refuses even a lone user's message. Empty: it does not, or is none."""
        if self._renderer is None and self._source([]) is None:
            return ""
        try:
            asked = fit_messages([{"role": "user", "content": ASKED}], self.form)
            self.apply_template(asked, [], {}, probe=True)
        except TemplateLimit:
            raise
        except BadRequest as refused:
            return refused.message
        return ""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of `text`. `special`: with the special tokens that the tokenizer puts around a text.
        Raises `ContextTooLong`, see `within`."""
        around = self._around if special else ([], [])
        if len(text) <= PIECE or around is None:
            return self._encode_piece(text, special=special)
        tokens = [*around[0]]
        for _, piece in self._long.pieces(text):
            tokens += self._encode_piece(piece, special=False)
            self._check(len(tokens))
        return tokens + around[1]

    @cached_property
    def _around(self) -> tuple[list[int], list[int]] | None:
        """Special tokens before and after every text. `None`: unknown."""
        bare, whole = (self._encode_piece("a", special=special) for special in (False, True))
        for at in range(len(whole) - len(bare) + 1):
            if whole[at : at + len(bare)] == bare:
                return whole[:at], whole[at + len(bare) :]
        return None

    def _encode_piece(self, text: str, *, special: bool) -> list[int]:
        with self._one_at_a_time.ask(1):
            return list(self.backend.encode(text, add_special_tokens=special))

    def _check(self, at_least: int) -> None:
        if self.context is not None and at_least >= self.context:
            raise ContextTooLong.of(at_least, self.context, "at least ")

    @cached_property
    def _long(self) -> LongText:
        return LongText(self.fast, partial(self._encode_piece, special=False))

    def encode_plain(self, text: str, *, before: str = "", special: bool = False) -> list[int]:
        """Ids of `before`, which may hold control tokens, and of a client's text after it. Raises
        `BadRequest` if the special tokens that `special` adds are unknown."""
        hidden = hide(self.control, Hidden((), (), {"text": text}), used=before)
        tokens = self.encode_hidden(before + hidden.variables["text"], hidden)
        if not special:
            return tokens
        if self._around is None:
            raise BadRequest("the special tokens that this model's tokenizer adds are unknown")
        return [*self._around[0], *tokens, *self._around[1]]

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        with self._one_at_a_time.ask(1):
            return str(self.backend.decode(list(tokens), skip_special_tokens=skip_special))

    def encode_hidden(self, text: str, hidden: Hidden) -> list[int]:
        """Ids of a text that was rendered from `hidden`, with the client's own characters."""
        if not hidden.marks and not self.control.reachable:
            return self.encode(text, special=False)
        return self.encode_with_offsets(text, hidden).ids

    def encode_with_offsets(self, text: str, hidden: Hidden) -> Encoded:
        """Like `encode_hidden`, with the character at which each token begins."""
        found, spans = self._locate(text)
        if not hidden.marks and not self.control.reachable:
            return Encoded(found, [start for start, _ in spans])
        return encode_spelled(self.fast, self.control, text, hidden.marks, found, spans)

    def _locate(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids without special tokens around them, and the characters of each: (first, end)."""
        tokens: list[int] = []
        spans: list[tuple[int, int]] = []
        for begin, piece in self._long.pieces(text):
            with self._one_at_a_time.ask(1):
                encoding = self.backend(
                    piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False
                )
            tokens += encoding["input_ids"]
            spans += [(begin + first, begin + end) for first, end in encoding["offset_mapping"]]
            if len(text) > PIECE:
                self._check(len(tokens))
        return tokens, spans

    def apply_template(
        self,
        messages: Messages,
        tools: Messages,
        variables: Variables,
        *,
        generation_prompt: bool = True,
        probe: bool = False,
    ) -> str:
        """The rendered text. Raises `BadRequest`, with the template's own message or without a
        template. A None in a message reaches the template. `probe`: see `TemplateRenderer`."""
        if self._renderer is not None:
            return self._python_template(messages, tools, variables, generation_prompt)
        source = self._source(tools)
        if source is None:
            raise BadRequest(
                "this model has no chat template: use completions, or put a chat_template.jinja "
                "beside its weights",
                param="messages",
            )
        return TemplateRenderer(source, self.backend.special_tokens_map).render(
            messages, tools, variables, generation_prompt=generation_prompt, probe=probe
        )

    def _source(self, tools: Messages) -> str | None:
        """The template's source. Some models have a separate one for requests with tools."""
        found = getattr(self.backend, "chat_template", None)
        if isinstance(found, Mapping):
            found = (found.get("tool_use") if tools else None) or found.get("default")
        return found if isinstance(found, str) else None

    def _python_template(
        self, messages: Messages, tools: Messages, variables: Variables, generation_prompt: bool
    ) -> str:
        try:
            text = self._renderer.apply_chat_template(
                [dict(m) for m in messages],
                tools=[dict(t) for t in tools] or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **variables,
            )
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise BadRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return str(text)

    def hide_and_render(
        self,
        messages: Messages,
        tools: Messages,
        variables: Variables,
        *,
        escaped: Container[str] | None = (),
    ) -> tuple[Hidden, str]:
        """A client's input with its control tokens hidden, and the text rendered from it.
        `escaped`: characters written as `\\uXXXX` in the first rendering; `None`: all."""
        given = Hidden(messages, tools, variables)
        hidden = self._hide(given, escaped)
        text = self._render_text(hidden)
        if lost := hidden.lost_characters(text):
            hidden = self._hide(given, lost)
            text = self._render_text(hidden)
        return hidden, text

    def render(self, messages: Messages, tools: Messages, variables: Variables) -> Prompt:
        """A prompt whose snapshot points are where a later prompt may begin to differ from it."""
        hidden, text = self.hide_and_render(messages, tools, variables)
        encoded = self.encode_with_offsets(text, hidden)
        prefixes = [*self._prefixes(hidden), self.system_part(hidden, text)]
        ends = (len(prefix) for prefix in prefixes if text.startswith(prefix))
        counts = {bisect_left(encoded.starts, end) for end in ends}
        points = sorted(c for c in counts if 0 < c < len(encoded.ids))
        return Prompt(encoded.ids, hidden.reveal(text), snapshot_points=tuple(points))

    def system_part(self, hidden: Hidden, text: str) -> str:
        """The beginning of a prompt's text that another user's prompt shares. Empty: no system
        message. Found by rendering another user's message: templates end this part differently."""
        messages = hidden.messages
        if len(messages) < 2 or messages[0]["role"] != "system":
            return ""
        other = [messages[0], *fit_messages([{"role": "user", "content": OTHER_USER}], self.form)]
        theirs = try_render(lambda: self._render_text(replace(hidden, messages=other)))
        return text[: common_length(text, theirs or "")]

    def _prefixes(self, hidden: Hidden) -> list[str]:
        """Possible beginnings of a later prompt: the first messages, and all but the reply."""
        count, found = len(hidden.messages), list[str | None]()
        for cut in sorted({min(1, count), min(2, count), count}):
            begun = replace(hidden, messages=hidden.messages[:cut])
            # a template may refuse a conversation without a user message
            found.append(try_render(partial(self._render_text, begun, generation_prompt=False)))
        return [text for text in found if text is not None]

    def _hide(self, given: Hidden, escaped: Container[str] | None) -> Hidden:
        return hide(self.control, given, escaped=escaped, used=self.chat_template or "")

    def _render_text(self, hidden: Hidden, *, generation_prompt: bool = True) -> str:
        given = (hidden.messages, hidden.tools, hidden.variables)
        text = self.apply_template(*given, generation_prompt=generation_prompt)
        return hidden.restore_marks(text)


def load_tokenizer(folder: Path, options: LoadOptions, nested: Any = None) -> HFTokenizer:
    """The tokenizer of a folder, with its chat template. `nested`: one that a processor has loaded.
    Raises `UnsupportedModel` without a fast form."""
    from transformers import AutoTokenizer

    trust = options.trust_remote_code
    backend = nested or AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    if getattr(backend, "backend_tokenizer", None) is None:
        raise UnsupportedModel(f"{folder.name} has no tokenizer.json and none can be made")
    backend.chat_template = _chat_template(folder, backend.chat_template)
    return HFTokenizer(backend)


def _chat_template(folder: Path, own: Any) -> str | Mapping[str, str] | None:
    """The template file next to the weights, else the processor's own, else the tokenizer's."""
    if not (folder / "chat_template.jinja").is_file():
        own = read_json(folder / "chat_template.json").get("chat_template") or own
    return own or None
