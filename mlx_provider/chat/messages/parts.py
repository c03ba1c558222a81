"""Reads one message, in the forms of several APIs: text, references to media, thoughts, and tool
calls as chat templates iterate over them. Parts that no model can take become text."""

import copy
import json
import re
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from ...bounds import MAX_VALUES, ValueCounter
from ...errors import BadRequest, wrong_part

MediaKind = Literal["image", "video", "audio"]
Detail = Literal["auto", "low", "high"]


@dataclass(frozen=True)
class MediaRef:
    """An image, video or audio that is not fetched yet."""

    kind: MediaKind
    source: str | tuple[str, ...] | None
    """URL or path; for a video, its frames. `None`: the client gave no source."""
    path: str  # the client's name of the part: `messages[3].content[1]`
    detail: Detail = "auto"
    required: bool = True  # if not, a text takes the place of media that cannot be read


Part = str | MediaRef

_TEXT = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_KINDS: tuple[MediaKind, ...] = get_args(MediaKind)
_MEDIA = {word: kind for kind in _KINDS for word in (f"{kind}_url", f"input_{kind}", kind)}
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
_DETAILS: tuple[tuple[Any, Detail], ...] = (
    (None, "auto"), ("auto", "auto"), ("low", "low"), ("high", "high"), ("original", "high"),
)  # fmt: skip


def content_parts(
    message: Mapping[str, Any], path: str, notes: list[str] | None = None
) -> tuple[Part, ...]:
    """Text and media in order. With `notes`, a part that no model can take becomes text and leaves
    a warning there, and media are not `required`. Without `notes`, media are `required`, and such a
    part is refused. Raises `BadRequest`."""
    content = message.get("content")
    path = f"{path}.content"
    if content is None:
        refusal = message.get("refusal")
        return (refusal,) if isinstance(refusal, str) else ()
    if isinstance(content, str):
        return (content,)
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, Sequence):
        raise wrong_part(path, "must be a string, a list of parts or null")
    parts = [
        _read_part_or_text(part, f"{path}[{i}]", notes)
        for i, part in enumerate(content)
        if not (isinstance(part, Mapping) and part.get("type") in _THOUGHTS)
    ]
    return tuple(part for part in parts if part != "") or ("",)


def reasoning_text(message: Mapping[str, Any]) -> str:
    """The thoughts of an assistant's message, in any API's form; empty: none."""
    for key in ("reasoning_content", "reasoning", "thinking"):
        value = message.get(key)
        if isinstance(value, str) and value:
            return value
    content = message.get("content")
    for blocks in (message.get("thinking_blocks"), content):
        texts = [_read_thought(block) for block in blocks] if isinstance(blocks, list) else []
        if any(texts):
            return "\n\n".join(text for text in texts if text)
    return ""


def _read_thought(block: Any) -> str:
    if not isinstance(block, Mapping) or block.get("type") not in _THOUGHTS:
        return ""
    text = block.get("thinking") or block.get("text") or ""
    return text if isinstance(text, str) else ""


def _read_part_or_text(part: Any, path: str, notes: list[str] | None) -> Part:
    try:
        found = _read_part(part, path)
    except BadRequest as error:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if notes is None or not isinstance(kind, str) or kind in _TEXT:
            raise
        notes.append(f"{error.message}: a text takes its place")
        return foreign_text(part)
    return found if notes is None or isinstance(found, str) else replace(found, required=False)


def _read_part(part: Any, path: str) -> Part:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise wrong_part(path, "must be an object with a `type`")
    kind = part.get("type")
    if isinstance(kind, str) and kind in _TEXT:
        return _read_text(part, _TEXT[kind], path)
    if kind == "tool_reference":
        return f"[tool: {part.get('tool_name') or part.get('name') or ''}]"
    if isinstance(kind, str) and kind in _MEDIA:
        return _read_media(part, kind, path)
    problem = "which is not supported; send text or image_url parts"
    raise wrong_part(path, f"is of type {kind!r}, {problem}")


def _read_text(part: Mapping[str, Any], key: str, path: str) -> str:
    text = part.get(key)
    if text is None:
        return ""
    if not isinstance(text, str):
        raise wrong_part(path, "must be a string", f".{key}")
    return text


def _read_media(part: Mapping[str, Any], word: str, path: str) -> MediaRef:
    kind = _MEDIA[word]
    if part.get("file_id"):
        problem = "names an uploaded file, which is not supported"
        raise wrong_part(path, f"{problem}; send a data: or https: URL")
    value, detail = _find_value(part, word, kind), part.get("detail")
    if isinstance(value, Mapping):
        detail = value.get("detail", detail)
    wanted = next((known for name, known in _DETAILS if name == detail), None)
    if wanted is None:
        raise BadRequest(f"{path}: detail must be auto, low or high", param=path)
    if isinstance(value, (list, tuple)) and kind == "video":
        source: str | tuple[str, ...] | None = tuple(
            _read_frame(frame, f"{path}.video[{i}]") for i, frame in enumerate(value)
        )
    else:
        source = None if value is None else _read_url(value, path)
    return MediaRef(kind, source, path, wanted)


def _find_value(part: Mapping[str, Any], word: str, kind: str) -> Any:
    keys = (word, f"{kind}_url", kind, "source", "url")
    return next((part[key] for key in keys if part.get(key) is not None), None)


def _read_frame(frame: Any, path: str) -> str:
    if isinstance(frame, Mapping) and "type" in frame:
        frame = _find_value(frame, str(frame["type"]), "image")
    return _read_url(frame, path)


def _read_url(value: Any, path: str) -> str:
    if isinstance(value, Mapping):
        if isinstance(value.get("data"), str):
            media_type = value.get("media_type") or value.get("format") or ""
            return f"data:{media_type};base64,{value['data']}"
        value = value.get("url")
    if not isinstance(value, str) or not value:
        raise wrong_part(path, "holds no URL; send {'url': 'data:...'}")
    return value


def canonical_calls(message: Mapping[str, Any], path: str) -> tuple[dict[str, Any], ...]:
    """The message's calls in OpenAI's form, with arguments as a mapping. Raises `BadRequest`."""
    calls = message.get("tool_calls")
    legacy = message.get("function_call")
    if calls is None and legacy is not None:
        return (_read_call({"function": legacy}, f"{path}.function_call"),)
    if calls is None:
        return ()
    if not isinstance(calls, (list, tuple)):
        raise wrong_part(f"{path}.tool_calls", "must be a list")
    return tuple(_read_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls))


def check_arguments(messages: Sequence[Any]) -> None:
    """Raise `BadRequest` for arguments (JSON text) with more values than a request may hold."""
    values = ValueCounter()
    for i, message in enumerate(messages):
        for arguments in _argument_texts(message):
            values.take_text(arguments)
            if values.count > MAX_VALUES:
                path = f"messages[{i}]"
                many = f"hold more than {MAX_VALUES} JSON values"
                raise BadRequest(f"{path}: the arguments of tool calls {many}", param=path)


def _argument_texts(message: Any) -> Iterator[str]:
    if not isinstance(message, Mapping):
        return
    calls = message.get("tool_calls")
    listed = calls if isinstance(calls, (list, tuple)) else ()
    functions = [call.get("function") for call in listed if isinstance(call, Mapping)]
    for function in (*functions, message.get("function_call")):
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str):
            yield arguments


def _read_call(call: Any, path: str) -> dict[str, Any]:
    function = (call.get("function") or call.get("custom")) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise wrong_part(path, "must hold `function` with a `name`")
    out: dict[str, Any] = {} if call.get("id") is None else {"id": call["id"]}
    out["type"] = "function"
    text = function.get("input")  # of a custom tool
    arguments = function.get("arguments") if text is None else {"value": text}
    out["function"] = {"name": name, "arguments": arguments_mapping(arguments)}
    return out


def arguments_mapping(arguments: Any) -> dict[str, Any]:
    """A call's arguments as a new mapping. What is no JSON object is kept whole under `value`, so a
    malformed call in the history neither fails the request nor loses text."""
    if isinstance(arguments, Mapping):
        return copy.deepcopy(dict(arguments))
    if isinstance(arguments, str):
        if not arguments.strip():
            return {}
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {"value": arguments}
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else {"value": copy.deepcopy(arguments)}


# -- blocks and items that only another server can use become text for a model: agents resend them
# in every turn of a conversation that began with a cloud model

MAX_CHARACTERS = 20_000
MAX_DEPTH = 12  # of fields within fields
IMAGES = ("image", "input_image", "image_url", "computer_screenshot")  # types of blocks
READABLE = (  # fields with text for a model, in this order
    "name", "tool_name", "server_label", "query", "queries", "input", "arguments", "action",
    "operation", "command", "code", "title", "filename", "context", "url", "source", "file",
    "text", "data", "file_data", "stdout", "stderr", "logs", "content", "output", "outputs",
    "result", "results", "error", "error_code", "return_code", "tools", "tool_references",
)  # fmt: skip
JSON = ("input", "arguments", "action", "operation")  # those of them that become JSON text
_TEXT_DATA = re.compile(r"data:(?:text/|application/(?:json|xml))[^,]*?(;base64)?,")


def foreign_text(block: Mapping[str, Any]) -> str:
    """The type of a block, and the text of its `READABLE` fields, up to `MAX_CHARACTERS`."""
    kind = str(block.get("type") or "block")[:100]
    if kind in IMAGES:
        return "[image: not available, not shown]"
    lines = list(dict.fromkeys(line for line in _lines(block, MAX_DEPTH) if line.strip()))
    if not lines:
        return f"[{kind}: not shown, this model cannot take it]"
    text = "\n".join([f"[{kind}]", *lines])
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + "\n[cut]"


def _lines(value: Any, deeper: int) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and deeper:
        for item in value:
            yield from _lines(item, deeper - 1)
    elif isinstance(value, Mapping) and deeper:
        if value.get("type") in IMAGES:
            yield "[image: not shown]"
            return
        for name in READABLE:
            if value.get(name) is not None:
                yield from _field(value, name, deeper - 1)


def _field(value: Mapping[str, Any], name: str, deeper: int) -> Iterator[str]:
    found = value[name]
    if name in JSON and not isinstance(found, str):
        yield json.dumps(found, ensure_ascii=False)
    elif name in ("data", "file_data"):
        yield from _data(value, found)
    elif name == "result" and value.get("type") == "image_generation_call":
        yield "[image: not shown]"
    elif isinstance(found, int) and not isinstance(found, bool):
        yield f"{name}: {found}"
    else:
        yield from _lines(found, deeper)


def _data(value: Mapping[str, Any], found: Any) -> Iterator[str]:
    if not isinstance(found, str):
        return
    text = _TEXT_DATA.match(found)
    if text is not None:
        body = found[text.end() :]
        try:
            yield b64decode(body).decode() if text[1] else body
        except ValueError:
            yield "[damaged, not shown]"
    elif value.get("type") == "text" or str(value.get("media_type")).startswith("text/"):
        yield found
