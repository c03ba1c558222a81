"""Every fenced block of `docs/` is run, is valid, or says in its title why it is not run.

`python` runs, `console` runs its lines that begin with `$ `, and `yaml`, `toml` and `json` are read
as the project reads them. If a block cannot run here, its title says why
(`console title="not run by the tests: needs a Mac"`); the names of `mlx-provider` commands and
options in it are checked. `text` is output of a program. `test_readme_blocks.py` runs the blocks of
the README.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from litellm.proxy.types_utils.utils import get_instance_fn
from sybil import Document, Example, Region
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

import mlx_provider.litellm as ours
from command_line import invoke
from mlx_provider.cli.app import build
from mlx_provider.client.connection import Connections
from mlx_provider.errors import BadRequest
from mlx_provider.gateway.engine import end_engine, warm_up
from mlx_provider.litellm.model_info import operator_options
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving.permissions import read_permissions

ROOT = Path(__file__).parents[2]
END = "$ mlx-provider down\n"
PAGES = sorted((ROOT / "docs").rglob("*.md"), key=lambda page: (END in page.read_text(), page))
"""Those last that end the engine, so that only one starts."""
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCED = RawFencedCodeBlockLexer(re.compile(r"(?P<language>\w*) *(?P<attributes>.*)\n"))
NOT_RUN = re.compile(r'title="not run by the tests: (?P<reason>[^"]+)"')
USAGE = typer.BadParameter.__mro__[1]
"""The error of typer for arguments that a command does not accept."""
SHELL = frozenset("|&;<>*?`$(){}")
"""Characters with a meaning only for a shell."""
BLOCK_SECONDS = 600
"""Only a block that hangs takes so long."""
NOT_RUN_SHARE = 0.5
"""Maximum share of all blocks."""


WRONG = (
    "```python\nraise KeyError\n```\n",
    "```console\n$ mlx-provider serve --prot 1\n```\n",
    "```console\n$ false | cat; exit 3\n```\n",
    "```console\nnothing to run\n```\n",
    "```yaml\nmodel_info: {mlx: {kv_bits: 3}}\n```\n",
    "```toml\n[model]\nkv_bits = 3\n```\n",
    "```json\n{,}\n```\n",
    "```\nno language\n```\n",
    "```sh\nno reason\n```\n",
    '```sh title="not run by the tests: too slow"\nmlx-provider launch --contxt 1 -- --any\n```\n',
    '```sh title="not run by the tests: too slow"\nmlx-provider top model\n```\n',
)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # LiteLLM's own
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT / "docs").as_posix())
def test_every_code_block_of_a_page_runs(
    page: Path, at_home: Path, engine: Callable[[], None]
) -> None:
    engine()
    for example in blocks(page):
        with time_limit(BLOCK_SECONDS):
            run(example)


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_code_block_fails_its_check(text: str, tmp_path: Path, at_home: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    (example,) = blocks(page)
    with pytest.raises((AssertionError, BadRequest, KeyError, ValueError)):
        run(example)


def test_most_code_blocks_of_the_docs_are_run() -> None:
    kinds = [kind_of(example) for page in PAGES for example in blocks(page)]
    idle = [(language, reason) for language, reason in kinds if reason or language == "text"]
    assert len(idle) <= NOT_RUN_SHARE * len(kinds), idle


def run(example: Example) -> None:
    language, reason = kind_of(example)
    assert language in EVALUATORS, f"line {example.line}: unknown language {language!r}"
    if reason:
        check_commands(example.parsed)
    elif f"```{language}\n{example.parsed}```" not in README:
        example.evaluate()


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def over(*_: object) -> None:
        raise TimeoutError(f"a block takes more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], None]]:
    """Start an engine for this file, with the demo model loaded."""
    with pytest.MonkeyPatch.context() as patch:
        folder = Path(os.environ["MLX_PROVIDER_RUNTIME_DIR"]) / "docs"  # a socket's path is short
        patch.setenv("MLX_PROVIDER_RUNTIME_DIR", str(folder))
        connections = Connections(dict(os.environ))
        client = connections.client(None, None)
        yield lambda: warm_up(client, "demo")
        end_engine(client)
        connections.close()


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder, with the commands of this Python."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return folder


def blocks(page: Path) -> list[Example]:
    return list(Document.parse(str(page), fenced).examples())


def fenced(document: Document) -> Iterator[Region]:
    for region in FENCED(document):
        language, source = region.lexemes["language"], region.lexemes["source"]
        found = Region(region.start, region.end, source, EVALUATORS.get(language))
        found.lexemes = region.lexemes
        yield found


def kind_of(example: Example) -> tuple[str, str]:
    """Its language, and the reason why it is not run."""
    lexemes = example.region.lexemes
    told = NOT_RUN.search(lexemes["attributes"])
    return lexemes["language"], told["reason"] if told else ""


def run_console(example: Example) -> None:
    lines = commands(example.parsed)
    assert lines, "no line begins with `$ `"
    if all(line.startswith("mlx-provider") and not SHELL & set(line) for line in lines):
        for line in lines:
            run_command(shlex.split(line)[1:])
    else:
        done = subprocess.run(["bash", "-ec", "\n".join(lines)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def run_command(words: list[str]) -> None:
    done = invoke(*words, plugins=None, catch_exceptions=False)
    assert done.exit_code == 0, done.output


def check_commands(text: str) -> None:
    """Whether `mlx-provider` has the commands and options that are shown."""
    for line in commands(text) or text.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["mlx-provider"] and not SHELL & set(line):
            check_arguments(words[1 : words.index("--")] if "--" in words else words[1:])


def check_arguments(words: list[str]) -> None:
    """Whether the command accepts these arguments; runs nothing."""
    for name in (word for word in words if word.endswith(".json")):
        Path(name).touch()  # a page may name a file that it shows
    command: Any = typer.main.get_command(build(PluginRegistry.discover()))
    while words and (below := getattr(command, "commands", None)):
        command, words = below[words[0]], words[1:]
    try:
        command.make_context("mlx-provider", [*words])
    except typer.Exit:  # of --help and --version
        pass
    except USAGE as error:
        raise AssertionError(error.format_message()) from None


def commands(text: str) -> list[str]:
    whole = text.replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in whole if line.startswith("$ ")]


def read_yaml(example: Example) -> None:
    content = yaml.safe_load(example.parsed)
    for entry in content.get("model_list", [content] if "model_info" in content else []):
        operator_options(entry)
    for each in content.get("litellm_settings", {}).get("custom_provider_map", []):
        assert get_instance_fn(each["custom_handler"]) is ours.handler


def read_toml(example: Example) -> None:
    content = tomllib.loads(example.parsed)
    if not content.keys() & {"project", "build-system", "tool", "dependency-groups"}:
        file = Path("models.toml")
        file.write_text(example.parsed)
        read_permissions(file)


def read_json(example: Example) -> None:
    json.loads(example.parsed)


def leave(example: Example) -> None:
    """Output of a program, or a command that must say why it is not run."""
    assert kind_of(example)[0] == "text", (
        'it is not run: say why, title="not run by the tests: ..."'
    )


EVALUATORS = {
    "python": PythonEvaluator(),
    "console": run_console,
    "sh": leave,
    "text": leave,
    "yaml": read_yaml,
    "toml": read_toml,
    "json": read_json,
}
