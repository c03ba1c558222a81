"""The engine's events as content blocks, streamed or gathered."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from ...chat.messages.calls import arguments_mapping
from ...protocol.events import Delta
from ..openai.answer import call_pieces

Part = dict[str, Any]


class Blocks:
    """One block is open at a time."""

    def __init__(self, *, thoughts: bool = True) -> None:
        """`thoughts`: whether their text is sent, or only a block for each."""
        self._thoughts = thoughts
        self._kind: object = None
        """Type of the open block, or the number of its call."""
        self._index = -1
        self._signature = sha256()

    def feed(self, delta: Delta) -> Iterator[Part]:
        if delta.reasoning:
            yield from self._begin(
                "thinking", {"type": "thinking", "thinking": "", "signature": ""}
            )
            self._signature.update(delta.reasoning.encode())
            if self._thoughts:
                yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            yield from self._begin("text", {"type": "text", "text": "", "citations": None})
            yield self._delta({"type": "text_delta", "text": delta.content})
        for piece in call_pieces(delta.tool_calls):
            function = piece["function"]
            call = {"type": "tool_use", "id": piece["id"], "name": function["name"]}
            block = {**call, "input": {}, "caller": {"type": "direct"}}
            yield from self._begin(piece["index"], block)
            if function["arguments"]:
                part = {"type": "input_json_delta", "partial_json": function["arguments"]}
                yield self._delta(part)

    def end(self) -> Iterator[Part]:
        if self._kind is None:
            return
        if self._kind == "thinking":  # clients drop thoughts without a signature
            yield self._delta({"type": "signature_delta", "signature": self._signed()})
        yield {"type": "content_block_stop", "index": self._index}
        self._kind = None

    def _begin(self, kind: object, block: Part) -> Iterator[Part]:
        if kind != self._kind:
            yield from self.end()
            self._kind, self._signature = kind, sha256()
            self._index += 1
            yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, part: Part) -> Part:
        return {"type": "content_block_delta", "index": self._index, "delta": part}

    def _signed(self) -> str:
        return b64encode(self._signature.digest()).decode()


class Content:
    def __init__(self) -> None:
        self._blocks: list[Part] = []
        self._texts: list[dict[str, list[str]]] = []

    def add(self, event: Part) -> None:
        if event["type"] == "content_block_start":
            self._blocks.append(event["content_block"])
            self._texts.append({})
        elif event["type"] == "content_block_delta":
            ((name, text),) = ((k, v) for k, v in event["delta"].items() if k != "type")
            self._texts[-1].setdefault(name, []).append(text)

    def whole(self) -> list[Part]:
        return [
            _whole(block, {name: "".join(texts) for name, texts in pieces.items()})
            for block, pieces in zip(self._blocks, self._texts, strict=True)
        ]


def _whole(block: Part, texts: dict[str, str]) -> Part:
    if block["type"] == "tool_use":
        return block | {"input": arguments_mapping(texts.get("partial_json"))}
    return block | texts
