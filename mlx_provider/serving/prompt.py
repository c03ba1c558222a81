"""A request's prompt as tokens: messages in the form of the model's template, or raw text."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..chat.media.fetch import MediaPolicy
from ..chat.media.load import MediaClaim, load_media
from ..chat.messages.normalise import MediaSupport, Normalised, normalise
from ..chat.messages.tools_as_text import describe_tools, write_as_text
from ..errors import BadRequest, ContextTooLong, MediaError, PluginError
from ..families.tokenizer.template import TemplateLimit, fit_messages, fit_tools
from ..protocol.requests import GenerateRequest, ModelOptions
from ..records import MediaItem, ModelInfo, Prompt, TemplateForm
from .weights import ModelView

log = logging.getLogger(__name__)

MAX_MEDIA_FAILURES = 8
"""After so many failed renderings of a request, all media that may be missing become text."""
LONG_TEXT_RATIO = 8
"""Texts with more characters per token of the context are counted before they are rendered. Usual
texts have three to five."""
HostWork = Callable[[], AbstractContextManager[object]]
"""Makes a context that holds a turn for work on the host, for which requests wait."""
TEMPLATE = "the model's chat template"
HISTORY_AS_TEXT = f"{TEMPLATE} does not take these tool messages: they are written as text"
TEXT_LEFT_OUT = f"{TEMPLATE} has no place for text beside tool calls: it is left out"
TOOLS_AS_TEXT = f"{TEMPLATE} does not show these tools: a system message describes them"


@dataclass(frozen=True)
class RenderedPrompt:
    prompt: Prompt
    warnings: tuple[str, ...] = ()


def render_prompt(
    view: ModelView,
    request: GenerateRequest,
    claim: MediaClaim | None = None,
    host_work: HostWork = nullcontext,
) -> RenderedPrompt:
    """Render and tokenise (host work, any thread). Raises `BadRequest` that names the part.
    `claim`: charged with the images; `None`: a new one with default limits. `host_work`: entered
    for rendering, but not while waiting for images."""
    if (request.messages is None) == (request.prompt is None):
        raise BadRequest("give either messages or a prompt", param="messages")
    if request.messages is None:
        with host_work():
            raw, tokenizer = request.prompt or "", view.model.tokenizer
            if isinstance(raw, list):
                return RenderedPrompt(Prompt(raw))
            return RenderedPrompt(Prompt(tokenizer.encode(raw, special=True), text=raw))
    with host_work():
        _refuse_too_long(view, request.messages)
        media = _RequestMedia(view, request)
    media.load(claim)
    while True:
        try:
            with host_work():
                prompt, form_warnings = _render_first_accepted(view, request, media)
                _decode_media(view, request, prompt)
            break
        except MediaError as error:
            media.handle_failure(error)
    template = view.model.info.chat_template
    unread = [name for name in request.template if template and name not in template]
    no_effect = [f"{n} has no effect: the model's chat template does not read it" for n in unread]
    return RenderedPrompt(prompt, (*media.warnings, *no_effect, *form_warnings))


def _refuse_too_long(view: ModelView, messages: Sequence[Any]) -> None:
    """Raise `ContextTooLong` for texts too long with any template. Assistant texts do not count,
    because a template may leave them out."""
    longest, tokens = view.info.context_length, 0
    texts = [text for message in messages for text in _texts(message)]
    if sum(map(len, texts)) < LONG_TEXT_RATIO * longest:
        return
    for text in texts:
        # a template may join its first token with text before it
        tokens += max(0, len(view.model.tokenizer.encode_plain(text)) - 1)
        if tokens >= longest:
            raise ContextTooLong.of(tokens, longest, "at least ")


def _texts(message: object) -> list[str]:
    if not isinstance(message, Mapping) or message.get("role") == "assistant":
        return []
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    found = (part.get("text") for part in parts if isinstance(part, Mapping))
    return [text for text in found if isinstance(text, str)]


class _RequestMedia:
    """Messages and media of a request. Text takes the place of media that fail; pixels are decoded
    after rendering, and may fail then."""

    def __init__(self, view: ModelView, request: GenerateRequest) -> None:
        self._view = view
        self._request = request
        self._unreadable: dict[str, str] = {}
        """Path -> reason."""
        self._notes: list[str] = []
        self._failures = 0
        self.normalised = self.normalise_with("")
        self._refs = {ref.path: ref for ref in self.normalised.media}
        self._items: dict[str, MediaItem | MediaError] = {}

    def normalise_with(self, about_tools: str) -> Normalised:
        """Canonical messages in the form of the model's template. `about_tools`: a system message
        that describes the tools."""
        info, request = self._view.model.info, self._request
        support = media_support(info, request.options)
        return normalise(
            request.messages or [],
            hoist_system=info.hoist_system,
            system_role=info.system_role,
            alternate=info.alternate,
            tool_media=info.tool_media,
            support=replace(support, unreadable=self._unreadable),
            # the beginning of a reply is one text
            text_parts=info.template.text_parts - ({"assistant"} if request.continues else set()),
            about_tools=about_tools,
        )

    def load(self, claim: MediaClaim | None) -> None:
        """Raises the error of media that are required and cannot be read."""
        if not self._refs:
            return
        allowed = self._request.options.allow_media
        policy = MediaPolicy(allow_private="private" in allowed, allow_file="file" in allowed)
        max_pixels = self._view.model.info.max_pixels
        loaded = load_media(self.normalised.media, policy, claim, max_pixels)
        self._items = dict(zip(self._refs, loaded, strict=True))
        if failed := [error for error in loaded if isinstance(error, MediaError)]:
            self._replace_by_text(failed)

    @property
    def items(self) -> list[MediaItem]:
        """Without those that became text."""
        found = (self._items[ref.path] for ref in self.normalised.media)
        return [item for item in found if isinstance(item, MediaItem)]

    @property
    def warnings(self) -> tuple[str, ...]:
        return (*self.normalised.warnings, *self._notes)

    def handle_failure(self, error: MediaError) -> None:
        """Replace the media that an error names by text; if it names none, all that are not
        required. Raises the error if they are required, or there are none."""
        errors = [error, *error.others]
        self._failures += 1
        if error.param is None or self._failures >= MAX_MEDIA_FAILURES:
            left = [r.path for r in self.normalised.media if not r.required]
            errors = [MediaError(f"{p}: {error.message}", param=p, brief=error.brief) for p in left]
        self._replace_by_text(errors)
        if not errors:
            raise error

    def _replace_by_text(self, errors: Sequence[MediaError]) -> None:
        for error in errors:
            path = (error.param or "").partition(".video[")[0]  # the video of a frame
            ref = self._refs.get(path)
            if ref is None or ref.required or path in self._unreadable:
                raise error
            self._unreadable[path] = error.brief
            self._notes.append(f"{error.message}: a text takes its place")
        self.normalised = self.normalise_with("")


def media_support(info: ModelInfo, options: ModelOptions) -> MediaSupport:
    return MediaSupport(frozenset() if options.modality == "text" else info.media)


def _decode_media(view: ModelView, request: GenerateRequest, prompt: Prompt) -> None:
    """Do the host work on media here, not on the engine thread, unless their features are cached.
    Raises `MediaError` with all that fail."""
    failed: list[MediaError] = []
    for span in prompt.spans:
        key = (request.namespace, span.content_hash)
        if span.ready is not None and key not in view.engine.features:
            try:
                span.ready()
            except MediaError as error:
                failed.append(error)
    if failed:
        raise MediaError.with_others(failed)


@dataclass(frozen=True)
class _AsText:
    """Parts of the request written as text, because the template has no place for them."""

    tools: bool
    history: bool

    @property
    def warnings(self) -> list[str]:
        tools = [TOOLS_AS_TEXT] if self.tools else []
        return [*tools, HISTORY_AS_TEXT] if self.history else tools


def _render_first_accepted(
    view: ModelView, request: GenerateRequest, media: _RequestMedia
) -> tuple[Prompt, list[str]]:
    """The prompt in the first form that the template accepts, and warnings. Raises the template's
    first error if it accepts none."""
    refused: BadRequest | None = None
    for as_text in _list_forms(view, request):
        try:
            prompt = _render_form(view, request, media, as_text)
            warnings = as_text.warnings
            calling = [m for m in media.normalised.messages if m.get("tool_calls")]
            drops = not as_text.history and view.model.info.template.text_with_calls == "dropped"
            if drops and any(message.get("content") for message in calling):
                warnings.append(TEXT_LEFT_OUT)
            for warning in warnings:
                _log_once(view.name, warning, refused.message if refused else "")
            return prompt, warnings
        except (TemplateLimit, ContextTooLong, MediaError):
            raise
        except BadRequest as error:
            refused = refused or error
    assert refused is not None  # noqa: S101  (there is at least one form)
    raise refused


@lru_cache(maxsize=256)
def _log_once(model: str, warning: str, complaint: str) -> None:
    log.warning("%s: %s%s", model, warning, complaint and f" ({complaint})")


def _list_forms(view: ModelView, request: GenerateRequest) -> list[_AsText]:
    """The template's own form, then forms with more and more parts as text."""
    form, tools = view.model.info.template, bool(_tools(request))
    history = has_tools(request.messages or [])
    hidden = tools and hides_tools(form, request.messages or [])
    first = _AsText(hidden, history and not form.takes_calls)
    further = [_AsText(t, h) for h in (first.history, history) for t in (first.tools, tools)]
    return list(dict.fromkeys([first, *further]))


def has_tools(messages: Sequence[Any]) -> bool:
    """Calls or results, also in messages that are refused later."""
    return any(
        m.get("role") in ("tool", "function") or m.get("tool_calls") or m.get("function_call")
        for m in messages
        if isinstance(m, Mapping)
    )


def hides_tools(form: TemplateForm, messages: Sequence[Any]) -> bool:
    """Whether the template would not show the tools with these messages."""
    first = messages[0] if messages else None
    has_system = isinstance(first, Mapping) and first.get("role") in ("system", "developer")
    return form.shows_tools == "never" or (form.shows_tools == "with_system" and not has_system)


def _render_form(
    view: ModelView, request: GenerateRequest, media: _RequestMedia, as_text: _AsText
) -> Prompt:
    tools, form = _tools(request), view.model.info.template
    parser = view.tool_parser or view.forced_parser
    normalised = media.normalised
    if as_text.tools:
        normalised = media.normalise_with(describe_tools(tools, parser))
    messages: Sequence[Mapping[str, Any]] = normalised.messages
    messages, reply_start = split_reply(messages) if request.continues else (messages, "")
    if as_text.history:
        messages = write_as_text(messages, parser, tools)
    prompt = view.model.prepare(
        fit_messages(messages, form),
        tools=[] if as_text.tools else fit_tools(tools, form),
        media=media.items,
        variables=request.template,
    )
    if not isinstance(prompt, Prompt):
        plugin, kind = view.weights.third_party or view.weights.plugin, type(prompt).__name__
        raise PluginError(f"plugin {plugin}: prepare gave {kind}, no Prompt")
    return _continue_reply(view, prompt, reply_start) if reply_start else prompt


def _tools(request: GenerateRequest) -> list[dict[str, Any]]:
    if request.tool_choice == "none":
        return []
    return [
        {k: _compact(v) if isinstance(v, Mapping) else v for k, v in _compact(tool).items()}
        for tool in request.tools
    ]


def _compact(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def split_reply(messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Split off a last assistant message, the beginning of the reply. Raises `BadRequest` if there
    are no messages before it."""
    *before, last = messages
    text = last["content"]
    if last["role"] != "assistant" or last.get("tool_calls") or not isinstance(text, str):
        return messages, ""
    if not before:
        raise BadRequest("messages holds no turn before the assistant's", param="messages")
    return before, text


def _continue_reply(view: ModelView, prompt: Prompt, reply_start: str) -> Prompt:
    reasoning = view.reasoning_parser
    tail, before = prompt.text.rstrip(), ""
    if reasoning is not None and reasoning.end and tail.endswith(reasoning.openers() or "\0"):
        before = f"\n{reasoning.end}\n\n"
    added = view.model.tokenizer.encode_plain(reply_start, before=before)
    return replace(prompt.followed_by(added), text=prompt.text + before + reply_start)


def prompt_text(view: ModelView, prompt: Prompt) -> str:
    """The text of a prompt, decoded if it came as token ids."""
    return prompt.text or view.model.tokenizer.decode(prompt.tokens, skip_special=False)
