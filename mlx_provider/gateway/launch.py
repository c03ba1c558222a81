"""A client's program with a gateway of its own, from start to end. Its folder keeps its path, since
agents write it into system prompts: a new path would miss the prefix cache."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path, PurePosixPath

from ..client.connection import local_client
from ..client.http import HttpClient
from ..client.runtime_folder import EngineLock, check_folder
from ..config import runtime
from ..errors import BadRequest, EngineUnavailable, NotInstalled, PluginError
from ..isolation import plugin_call
from ..records import Client, Gateway, Profile
from ..safe_open import replace_own
from . import foreground
from .config import ANYTHING, Served, served_config, write_config
from .engine import Tell, loading, show_prefill
from .proxy import Proxy, make_key, require_proxy, start_proxy

NO_PROXY_NAMES = ("NO_PROXY", "no_proxy")
LOOPBACK = "127.0.0.1,localhost"
HIDDEN_KEY = "sk-..."
LONGEST_NAME = 60
PROFILE = "profile"


def executable(client: Client, environ: Mapping[str, str] = os.environ) -> str:
    found = shutil.which(client.command, path=environ.get("PATH"))
    if found is None:
        raise NotInstalled(f"{client.command} is not installed: {client.install}")
    return found


@dataclass(frozen=True)
class Prepared:
    command: tuple[str, ...]
    added: Mapping[str, str]  # variables that differ from the user's environment
    hidden: tuple[str, ...]  # variables of the user that the client does not get
    files: Mapping[str, str]  # contents, by path in the client's folder

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in environ.items() if name not in self.hidden}
        return {**kept, **self.added}

    def write(self, folder: Path) -> None:
        for name, content in self.files.items():
            replace_own(folder / name, content.encode())


def prepare(
    client: Client,
    gateway: Gateway,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    *,
    as_subagent: bool = False,
) -> Prepared:
    """A client's command, variables and files. `as_subagent`: by `Client.subagent`; `BadRequest` if
    it has none. Raises `PluginError` for a profile that fails, would show the key in `ps`, or has
    files outside its folder."""
    make = client.subagent if as_subagent else client.profile
    if make is None:
        name = client.title or client.name
        raise BadRequest(f"{name} cannot have a subagent on another server than its main model")
    problem = f"client {client.name!r}: its profile failed: "
    profile = plugin_call(lambda: make(gateway), lambda fault: PluginError(problem + fault.summary))
    if not isinstance(profile, Profile):
        raise PluginError(f"{problem}gave {type(profile).__name__}, not Profile")
    command = (client.command, *profile.arguments, *arguments)
    if any(gateway.key in word for word in command):
        raise PluginError(f"client {client.name!r}: the key stands on its command line")
    for name in profile.files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise PluginError(f"client {client.name!r}: file {name!r} is outside of its folder")
    hidden = {n for n in environ if any(fnmatchcase(n, p) for p in profile.hidden)}
    added = {**loopback_variables(environ), **profile.environment}
    return Prepared(command, added, tuple(sorted(hidden - added.keys())), profile.files)


def loopback_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """`NO_PROXY` with loopback, in both spellings, as programs differ in which they prefer."""
    values = [value for name in NO_PROXY_NAMES if (value := environ.get(name, "").strip())]
    value = "*" if "*" in values else ",".join(dict.fromkeys([*values, LOOPBACK]))
    return dict.fromkeys(NO_PROXY_NAMES, value)


def first_folder(client: str, model: str, environ: Mapping[str, str]) -> Path:
    """The path of a client's folder, if no other launch uses it."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{client}-{model}")
    return runtime(environ).folder / "launch" / name[: len(client) + 1 + LONGEST_NAME]


@contextmanager
def launch_folder(client: str, model: str, environ: Mapping[str, str]) -> Iterator[Path]:
    """An empty folder of this user only, removed with the block: `NAME`, or `NAME.2`, ... while
    another launch holds the lock. A killed launch holds none. Raises `EngineUnavailable`."""
    check_folder(runtime(environ), make=True)
    folder = first = first_folder(client, model, environ)
    first.parent.mkdir(mode=0o700, exist_ok=True)
    numbers = count(2)
    while (lock := EngineLock.try_take(lock_file := Path(f"{folder}.lock"))) is None:
        folder = Path(f"{first}.{next(numbers)}")
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock_file.unlink(missing_ok=True)
        lock.release()


@dataclass(frozen=True)
class Launch:
    client: Client
    served: Served
    arguments: Sequence[str]
    environ: Mapping[str, str]
    without_proxy: bool = False  # the client talks to a listener of the engine, without LiteLLM
    as_subagent: bool = False  # it keeps its main model, and gets a subagent with the served one

    def run(self, tell: Tell) -> int:
        """Returns the client's exit code. Always removes the folder, and ends proxy or listener.
        Raises `NotInstalled`, `EngineUnavailable`, `BadRequest` or `PluginError` (see `prepare`),
        the errors of the load, and `SystemExit` for a signal before the client runs."""
        program, client, environ = executable(self.client, self.environ), self.client, self.environ
        if not self.without_proxy:
            require_proxy()
        with ExitStack() as ending:
            ending.enter_context(foreground.ending_by_signal())
            folder = ending.enter_context(launch_folder(client.name, self.served.name, environ))
            (folder / PROFILE).mkdir(mode=0o700)
            engine = local_client(environ)
            ending.callback(engine.close)
            with loading(self.served, engine, tell):
                proxy = None if self.without_proxy else self._start_proxy(folder, ending)
            if proxy is None:
                url, key = self._listen(engine, ending)
            else:
                proxy.wait_ready()
                url, key = proxy.url, proxy.key
                tell("proxy", url)
            prepared = self._prepare(url, key, folder / PROFILE)
            prepared.write(folder / PROFILE)
            tell("client", f"{client.title or client.name}, {client.api} API")
            # the path that was found, as the client's own variables may change `PATH`
            command = [program, *prepared.command[1:]]
            try:
                with show_prefill(engine.stats, sys.stderr):
                    return foreground.run(command, prepared.environment(environ))
            except OSError as error:
                raise EngineUnavailable(f"{program} cannot be run: {error.strerror}") from None

    def _start_proxy(self, folder: Path, ending: ExitStack) -> Proxy:
        # as a subagent, it has one name, and the main model is passed on; else it has every name
        names, forwards = ((), self.client.forwards) if self.as_subagent else (ANYTHING, "")
        config = served_config(self.served, names, forwards)
        proxy = start_proxy(write_config(config, folder), self.environ)
        ending.callback(proxy.stop)
        return proxy

    def _listen(self, engine: HttpClient, ending: ExitStack) -> tuple[str, str]:
        """URL and key of a listener of the engine's own."""
        key, model = make_key(), self.served
        fields = {"model": model.model, "max_tokens": model.output, "options": model.options}
        url, stream = engine.open_listener({"key": key, **fields})
        ending.callback(stream.close)
        return url, key

    def preview(self) -> list[str]:
        """What `run` would run, line by line, with another port. Starts and writes nothing."""
        folder = first_folder(self.client.name, self.served.name, self.environ) / PROFILE
        key = make_key()
        prepared = self._prepare("http://127.0.0.1:4000", key, folder)
        lines = [f"{name}={value}" for name, value in prepared.added.items()]
        lines += [f"unset {name}" for name in prepared.hidden]
        for name, content in prepared.files.items():
            lines += [f"# {folder / name}", *content.splitlines()]
        lines += ["# command", shlex.join(prepared.command)]
        return [line.replace(key, HIDDEN_KEY) for line in lines]

    def _prepare(self, url: str, key: str, folder: Path) -> Prepared:
        model, subagent = self.served, self.as_subagent
        sizes = (model.context, model.output)
        gateway = Gateway(url, key, model.name, *sizes, model.images, folder, Path.cwd())
        return prepare(self.client, gateway, self.arguments, self.environ, as_subagent=subagent)
