"""Talks to an engine in the terminal: `mlx-provider demo` (engine, proxy and an OpenAI client, end
to end, with no download) and `mlx-provider chat`."""

from __future__ import annotations

import base64
import mimetypes
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..errors import BadRequest, MLXProviderError
from .engine import ApiBase, ApiKeyFile, api_key_of
from .gateway import show_step

if TYPE_CHECKING:
    from ..client.generation import Generation
    from ..client.http import HttpClient
    from ..gateway.engine import SeparateGateway

NEXT = """
[bold]mlx-provider up demo[/bold] starts the same to stay, and prints what your own client needs.
Coding agents need a larger model: [bold]mlx-provider[/bold] alone names two for this machine."""
Message = dict[str, Any]


def demo() -> None:
    """Serve the shipped model through a LiteLLM proxy and talk to it.

    Exit code 0: every answer was right; 1: an answer was wrong; 130: Ctrl-C."""
    from ..demo import stage
    from ..gateway.foreground import ending_by_signal

    console = Console(highlight=False)
    try:
        console.print("starting an engine process and a LiteLLM proxy ...", style="dim")
        start = time.monotonic()
        with ending_by_signal(), stage() as running:
            console.print(f"ready after {time.monotonic() - start:.1f} s\n", style="dim")
            code = 0 if _perform(running, console) else 1
        console.print(NEXT, soft_wrap=True)
    except SystemExit:
        console.print("\nstopped", style="dim")
        raise
    raise typer.Exit(code)


def _perform(running: SeparateGateway, console: Console) -> bool:
    import openai

    from ..demo import MODEL, RECALL, STREAMED, Scenario

    with openai.OpenAI(
        base_url=f"{running.proxy.url}/v1",
        api_key=running.proxy.key,
        http_client=openai.DefaultHttpxClient(trust_env=False),  # loopback needs no proxy
    ) as client:
        scenario = Scenario(client, MODEL)
        show = lambda piece: console.print(piece, end="", soft_wrap=True)  # noqa: E731
        console.print(Text(f"> {STREAMED}", style="bold"))
        checks = [scenario.story(show)]
        console.print(Text(f"\n\n> {RECALL}", style="bold"))
        checks += [scenario.recall(show), *scenario.at_once(), scenario.see()]
    health = running.engine.health()
    model = health.models[0]
    where = f"family {model.family} of {model.plugin}, on {health.device}, BLAS: {health.blas}"
    console.print(f"\n\n{model.model}: {where}", style="dim", soft_wrap=True)
    for check in checks:
        mark, style = ("ok", "green") if check.passed else ("failed", "red")
        console.print(Text(mark, style=style), Text(check.claim), end="")
        console.print("" if check.passed else Text(f" - answered {check.answer!r}", style="red"))
    return all(check.passed for check in checks)


def chat(
    model: Annotated[str, typer.Argument(help="Hub id, folder, or demo.")] = "demo",
    image: Annotated[
        list[Path] | None, typer.Option(help="Image for the first message; repeatable.")
    ] = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    api_base: ApiBase = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Chat with a model. Ctrl-C ends a reply, Ctrl-D the chat: code 1 if its last turn failed."""
    from ..client.connection import connect
    from ..serving.hub import full_name, local_folder

    images = [image_part(path) for path in image or []]
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    model = full_name(model)
    if api_base is None:
        local_folder(model)  # an error before the first line is typed
    conversation = Conversation(connect(api_base, api_key_of(api_key_file)), model, messages)
    failed = False
    console = Console(highlight=False, soft_wrap=True)
    while (line := _line(console)) is not None:
        if not line.strip():
            continue
        text = {"type": "text", "text": line}
        try:
            conversation.say([*images, text] if images else line, console)
        except MLXProviderError as error:
            if not is_terminal():
                raise
            console.print(Text(f"error: {error.message}", style="red"))
            failed = True
        else:
            images, failed = [], False
    if failed:
        raise typer.Exit(1)


class Conversation:
    """The messages of a chat. A turn that fails does not change them."""

    def __init__(self, client: HttpClient, model: str, messages: list[Message]) -> None:
        self._client = client
        self._model = model
        self.messages = messages

    def say(self, content: str | list[Message], console: Console) -> None:
        """Send a user turn and print the reply while it comes. Raises the engine's error. Ctrl-C
        cancels the rest of the reply and keeps what came."""
        from ..gateway.engine import show_load
        from ..protocol.requests import GenerateRequest

        messages = [*self.messages, {"role": "user", "content": content}]
        request = GenerateRequest(model=self._model, messages=messages)
        with show_load(self._client.stats, show_step):
            generation = self._client.submit(request)
        reply: list[str] = []
        try:
            _print_reply(generation, console, reply)
        except KeyboardInterrupt:
            console.print(Text(" (stopped)", style="dim"))
        finally:
            generation.close()
        self.messages = [*messages, {"role": "assistant", "content": "".join(reply)}]


def _print_reply(generation: Generation, console: Console, reply: list[str]) -> None:
    from ..protocol.events import Delta, Done

    for warning in generation.accepted.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
    for event in generation:
        if isinstance(event, Done):
            usage, rate = event.usage, event.timings.tokens_per_second
            numbers = (
                f"\n[{usage.completion_tokens} tokens, {rate:.0f} tok/s; prompt "
                f"{usage.prompt_tokens}, of which {usage.cached_tokens} from the cache]"
            )
            console.print(Text(numbers, style="dim"))
        if isinstance(event, Delta):
            reply.append(event.content)
            console.print(Text(event.reasoning, style="dim"), Text(event.content), sep="", end="")
            for call in event.tool_calls:
                text = (f"\n{call.name} " if call.name else "") + call.arguments
                console.print(Text(text, style="cyan"), end="")


def image_part(path: Path) -> Message:
    """A file as a part of type `image_url`. Raises `BadRequest` if it cannot be read."""
    try:
        content = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise BadRequest(f"image {path}: {error.strerror}", param="image") from None
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{content}"}}


def _line(console: Console) -> str | None:
    try:
        return console.input("[bold]> [/bold]" if is_terminal() else "")
    except (EOFError, KeyboardInterrupt):
        return None


def is_terminal() -> bool:
    return sys.stdin.isatty()
