"""Renders chat templates for the engine, in a process of `bounded_process`.

A chat template is a program of the model's publisher. Here it runs in Jinja's sandbox; the process
limits its processor time and memory, and `render_text` its output. A test compares the environment
with transformers 5.23 (`utils/chat_template_utils.py`, `_cached_compile_jinja_template`)."""

import datetime
import json
import signal
import time
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.utils
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields in which templates read the thoughts of an earlier turn."""


class TooLarge(Exception):
    """A template has written more characters than allowed."""


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks a model's text for training. Only its body is written."""

    tags = {"generation"}  # noqa: RUF012  (as the base class has it)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Namespace(jinja2.utils.Namespace):
    """Refuses names that begin with an underscore, like upstream's."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class Dictionary:
    """`dict` without access to its class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a name in a namespace cannot begin with an underscore: {name}")


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as `json.dumps` writes it; Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: Any) -> None:
    """A function for templates: refuse the messages with `message`."""
    raise TemplateError(str(message))


def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)  # noqa: DTZ005  (as upstream)


def environment() -> ImmutableSandboxedEnvironment:
    """Jinja's environment with the names that chat templates use."""
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    jinja.filters["tojson"] = tojson
    jinja.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    jinja.globals.update(dict=Dictionary(), namespace=Namespace)
    return jinja


def render_text(template: Any, request: dict[str, Any]) -> str:
    """The prompt. Raises `TooLarge`, the error of the source, or what the template raises."""
    if isinstance(template, Exception):
        raise template
    messages = [_alias_thoughts(message) for message in request["messages"]]
    more = {"documents": None, "add_generation_prompt": request["generation_prompt"]}

    def write(tools: Any) -> str:
        pieces, length = [], 0
        variables = request["variables"]
        for piece in template.generate(messages=messages, tools=tools, **more, **variables):
            pieces.append(piece)
            length += len(piece)
            if length > request["characters"]:
                raise TooLarge(f"it writes more than {request['characters']} characters")
        return "".join(pieces)

    if request["tools"]:
        return write(request["tools"])
    try:
        return write(None)
    except TypeError:  # some templates iterate over missing tools
        return write([])


def _alias_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    thought = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if thought is None:
        return message
    return {**dict.fromkeys(REASONING, thought), **message, "reasoning_content": thought}


def answer_in_time(templates: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """`text`, or `error` with its `line` and, at a limit, `limit`. `spent`: processor seconds."""
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])
    began = time.process_time()
    found = _render(templates, request)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return {**found, "spent": time.process_time() - began}


def _render(templates: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"text": render_text(templates[request["template"]], request)}
    except MemoryError:
        return {"error": "it takes too much memory", "limit": True}
    except TooLarge as error:
        return {"error": str(error), "limit": True}
    except SecurityError as error:
        return {"error": str(error), "line": _line(error), "limit": True}
    except Exception as error:  # noqa: BLE001  (a template may raise anything)
        return {"error": _message(error), "line": _line(error)}


def _message(error: Exception) -> str:
    kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
    return f"{kind}{error}"[:2000]


def _line(error: Exception) -> int | None:
    line, frame = getattr(error, "lineno", None), error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = frame.tb_lineno
        frame = frame.tb_next
    return line


def compile_template(jinja: ImmutableSandboxedEnvironment, source: str, seconds: float) -> Any:
    """The template, or the error of its source. After `seconds`, a signal ends the process."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return jinja.from_string(source)
    except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def make_answerer() -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    """A function that compiles the template of a setup message, or answers a request."""
    jinja = environment()
    templates: dict[str, Any] = {}

    def answer(message: dict[str, Any]) -> dict[str, Any] | None:
        if "source" not in message:
            return answer_in_time(templates, message)
        templates[message["template"]] = compile_template(
            jinja, message["source"], message["seconds"]
        )
        return None

    return answer
