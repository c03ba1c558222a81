"""The engine's events as output items, and as the events of a stream that make them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...protocol.events import Delta, ToolCallDelta
from ..openai.answer import logprobs_of
from ..openai.custom_tools import unwrapped
from .tools import Called, ChatTools

Fields = dict[str, Any]


class Output:
    """The items of one reply. Each method yields the stream's events for its input."""

    def __init__(self, reply_id: str, tools: ChatTools) -> None:
        self.items: list[Fields] = []
        self._id = reply_id
        self._tools = tools
        self._open: _Thought | _Message | _Call | None = None

    def add(self, delta: Delta) -> Iterator[Fields]:
        if delta.reasoning:
            if not isinstance(self._open, _Thought):
                yield from self._begin(_Thought(self._next("rs")))
            yield from self._grown(delta.reasoning)
        if delta.content:
            if not isinstance(self._open, _Message):
                yield from self._begin(_Message(self._next("msg")))
            yield from self._grown(delta.content, logprobs_of(delta.logprobs))
        for piece in delta.tool_calls:
            if not (isinstance(self._open, _Call) and self._open.index == piece.index):
                yield from self._begin(self._call(piece))
            if piece.arguments:
                yield from self._grown(piece.arguments)

    def end(self, status: str = "completed") -> Iterator[Fields]:
        """`status`: `incomplete` for an item that was cut."""
        if self._open is not None:
            for event in self._open.end(status):
                yield self._placed(event)
            yield self._whole("done")
            self._open = None

    def _begin(self, item: _Thought | _Message | _Call) -> Iterator[Fields]:
        yield from self.end()
        self._open = item
        self.items.append(item.fields)
        yield self._whole("added")
        for event in item.begin():
            yield self._placed(event)

    def _grown(self, text: str, logprobs: Fields | None = None) -> Iterator[Fields]:
        assert self._open is not None  # noqa: S101  (a caller's mistake, not an input's)
        for event in self._open.add(text, logprobs["content"] if logprobs else []):
            yield self._placed(event)

    def _whole(self, what: str) -> Fields:
        """A copy, because the item still changes."""
        at = len(self.items) - 1
        item = self.items[at]
        return {"type": f"response.output_item.{what}", "output_index": at, "item": dict(item)}

    def _placed(self, event: Fields) -> Fields:
        at = len(self.items) - 1
        return {**event, "output_index": at, "item_id": self.items[at]["id"]}

    def _call(self, piece: ToolCallDelta) -> _Call:
        name = piece.name or ""
        called = self._tools.called.get(name, Called(name))
        return _Call(self._next("ctc" if called.custom else "fc"), piece, called)

    def _next(self, kind: str) -> str:
        return f"{kind}_{self._id}_{len(self.items)}"


class _Thought:
    def __init__(self, item_id: str) -> None:
        self._texts: list[str] = []
        self.fields: Fields = {"id": item_id, "type": "reasoning", "summary": []}

    def begin(self) -> Iterator[Fields]:
        yield self._event("part.added", part=self._part(""))

    def add(self, text: str, logprobs: list[Fields]) -> Iterator[Fields]:
        self._texts.append(text)
        yield self._event("text.delta", delta=text)

    def end(self, status: str) -> Iterator[Fields]:
        part = self._part("".join(self._texts))
        self.fields |= {"summary": [part], "status": status}
        yield self._event("text.done", text=part["text"])
        yield self._event("part.done", part=part)

    def _event(self, what: str, **more: Any) -> Fields:
        return {"type": f"response.reasoning_summary_{what}", "summary_index": 0, **more}

    def _part(self, text: str) -> Fields:
        return {"type": "summary_text", "text": text}


class _Message:
    def __init__(self, item_id: str) -> None:
        self._texts: list[str] = []
        self._logprobs: list[Fields] = []
        head = {"id": item_id, "type": "message", "role": "assistant"}
        self.fields: Fields = {**head, "status": "in_progress", "content": []}

    def begin(self) -> Iterator[Fields]:
        yield self._event("content_part.added", part=self._part(""))

    def add(self, text: str, logprobs: list[Fields]) -> Iterator[Fields]:
        self._texts.append(text)
        self._logprobs += logprobs
        yield self._event("output_text.delta", delta=text, logprobs=logprobs)

    def end(self, status: str) -> Iterator[Fields]:
        part = self._part("".join(self._texts))
        self.fields |= {"content": [part], "status": status}
        yield self._event("output_text.done", text=part["text"], logprobs=self._logprobs)
        yield self._event("content_part.done", part=part)

    def _event(self, what: str, **more: Any) -> Fields:
        return {"type": f"response.{what}", "content_index": 0, **more}

    def _part(self, text: str) -> Fields:
        logprobs = list(self._logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class _Call:
    """A call of a function, or of a custom tool, whose text is sent when it is complete."""

    def __init__(self, item_id: str, piece: ToolCallDelta, called: Called) -> None:
        self.index = piece.index
        self._custom = called.custom
        self._key = "input" if called.custom else "arguments"
        self._pieces: list[str] = []
        kind = "custom_tool_call" if called.custom else "function_call"
        self.fields: Fields = {
            "id": item_id,
            "type": kind,
            "call_id": piece.id or item_id,
            "name": called.name,
            self._key: "",
            "status": "in_progress",
        }
        if called.namespace is not None:
            self.fields["namespace"] = called.namespace

    def begin(self) -> Iterator[Fields]:
        return iter(())

    def add(self, text: str, logprobs: list[Fields]) -> Iterator[Fields]:
        self._pieces.append(text)
        if not self._custom:
            yield self._event("delta", delta=text)

    def end(self, status: str) -> Iterator[Fields]:
        text = "".join(self._pieces)
        if self._custom:
            text = unwrapped(text)
            yield self._event("delta", delta=text)
        self.fields |= {self._key: text, "status": status}
        named = {} if self._custom else {"name": self.fields["name"]}
        yield self._event("done", **{self._key: text}, **named)

    def _event(self, what: str, **more: Any) -> Fields:
        kind = "custom_tool_call_input" if self._custom else "function_call_arguments"
        return {"type": f"response.{kind}.{what}", **more}
