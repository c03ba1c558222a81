"""A model that writes a script: text, reasoning and calls of tools.

Tests of a client, a parser, a gateway or a plugin need a model whose next words are known:

    from mlx_provider.testing.scripted import Call, Step, build, environment, script

    folder = build(tmp_path / "model", "json", context_length=32_768)
    both = (Call("read", {"path": "a"}), Call("read", {"path": "b"}))
    prompt = script(Step("Looking.", (Call("bash", {"command": "ls"}),)), Step(calls=both))

The script is in the user's message; the client may write anything around it. The first step is the
reply to that message, the second the reply to the first tool results, and so on. After the last
step, a text quotes the last tool result. Without a script, the model repeats the question. If a
coding agent asks for a summary, to make room in its context, it gets the rest of the script.

The model knows the conversation only from its KV cache, so that a wrong cache gives wrong words.
This module is also the plugin with the family: other processes find it by `environment(folder)`."""

from __future__ import annotations

import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ... import (
    LoadedModel,
    LoadOptions,
    ModelFamily,
    ModelInfo,
    UnsupportedModel,
    __version__,
    hookimpl,
)

__all__ = ["FAMILY", "FORMATS", "Call", "Step", "build", "environment", "script"]

mlx_provider_api = 1

DISTRIBUTION = "mlx_provider_scripted"
MODEL_TYPE = "scripted"
CONTEXT = 200_000  # tokens
MERGES = 16_000  # of the tokenizer
BEGIN, END = "SCRIPT: ", " :END"
WRITTEN = re.compile(r"SCRIPT:(.*?):END", re.DOTALL)  # finds the scripts in a text
TURN, TURN_END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
# each is one token, which decoded text keeps
ADDED = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>".split()
RESULT = "<tool_response>\n"  # begins a message with a tool result
TOOLS = "\n<tools>\n"  # precedes the tools in the system message


class BadScript(ValueError):
    """The text between the marks is not a list of steps."""


@dataclass(frozen=True)
class Call:
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One reply of the model: a thought, then a text, then calls."""

    say: str = ""
    calls: tuple[Call, ...] = ()  # all in this reply
    think: str = ""
    count: int = 0  # the text goes on with the numbers from 1 up to this one
    slow: float = 0.0  # seconds for each token of the reply
    prefill: float = 0.0  # seconds for its whole prompt; cached tokens save their share
    since: float = 0.0
    """The time in seconds since 1970 from which `prefill` counts; 0: from the prompt's start. With
    one time for several prompts of an engine, they take their seconds side by side."""

    @property
    def text(self) -> str:
        return self.say + " ".join(map(str, range(1, self.count + 1)))

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Step:
        """The step with these fields of a script. Raises `BadScript` for wrong ones."""
        try:
            calls = tuple(Call(**call) for call in fields.get("calls", ()))
            return cls(**{**fields, "calls": calls})
        except TypeError as error:
            raise BadScript(str(error)) from None


def script(*steps: Step) -> str:
    """The text of a script, to put into a user's message."""
    fields = [{n: value for n, value in asdict(step).items() if value} for step in steps]
    return BEGIN + json.dumps(fields) + END


def steps_in(text: str) -> tuple[Step, ...] | None:
    """The last script in a text; `None`: it has none. It is JSON, or JSON inside a JSON string, as
    clients that quote a message leave it. Raises `BadScript`."""
    if not (found := WRITTEN.findall(text)):
        return None
    for reading in (json.loads, lambda written: json.loads(json.loads(f'"{written}"'))):
        try:
            steps = reading(found[-1])
        except ValueError:
            continue
        if isinstance(steps, list) and all(isinstance(step, dict) for step in steps):
            return tuple(map(Step.read, steps))
    raise BadScript(f"no JSON list of steps: {found[-1][:200]!r}")


def _as_json(call: Call) -> str:
    return json.dumps(asdict(call), ensure_ascii=False)


def _as_tags(call: Call) -> str:
    written = (
        f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
        "</parameter>\n"
        for name, value in call.arguments.items()
    )
    return f"<function={call.name}>\n{''.join(written)}</function>"


Format = Callable[[Call], str]
FORMATS: Mapping[str, Format] = {"json": _as_json, "tags": _as_tags}
"""How calls are written, by name: `json` as by Hermes and Qwen, `tags` as by Qwen's coders."""


def build(
    folder: Path, calls: str = "json", *, context_length: int = CONTEXT, merges: int = MERGES
) -> Path:
    """Write a checkpoint into `folder`, and return it. `calls`: a name of `FORMATS`. The tokenizer
    is trained on Python's standard library with so many `merges`: 16,000 take a second or two and
    give tokens of three letters on average, 2,000 take a fifth of a second and give two letters."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = (f"calls_as_{calls}.jinja", "template.jinja")
    template = "".join((Path(__file__).parent / part).read_text("utf-8") for part in parts)
    config = {"model_type": MODEL_TYPE, "calls": calls, "max_position_embeddings": context_length}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "chat_template.jinja").write_text(template)
    _write_tokenizer(folder, merges)
    return folder


def _write_tokenizer(folder: Path, merges: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.trainers import BpeTrainer

    special = [TEXT_END, TURN, TURN_END]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=len(special) + 256 + merges, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in library)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ADDED])
    tokenizer.save(str(folder / "tokenizer.json"))
    own = {"model_max_length": 1_000_000, "eos_token": TURN_END, "pad_token": TEXT_END}
    own |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(own, indent=1))


def environment(folder: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables with which a process finds the family in addition to the installed plugins: a
    `PYTHONPATH` with `folder` first, then that of `environ`. Writes into `folder` the files that
    pip would install for this plugin."""
    info = folder / f"{DISTRIBUTION}-{__version__}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    head = f"Metadata-Version: 2.1\nName: mlx-provider-scripted\nVersion: {__version__}\n"
    (info / "METADATA").write_text(head)
    (info / "entry_points.txt").write_text(f"[mlx_provider]\nscripted = {__name__}\n")
    before = environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [os.fspath(folder), before]))}


def load(folder: Path, options: LoadOptions) -> LoadedModel:
    """Load a checkpoint of `build`. Raises `UnsupportedModel` for unknown `calls`."""
    from ...families.checkpoint import context_length, fingerprint, read_json
    from ...families.tokenizer import load_tokenizer
    from .model import ScriptedModel

    config = read_json(folder / "config.json")
    calls = FORMATS.get(config.get("calls", ""))
    if calls is None:
        raise UnsupportedModel(f"calls of {folder} must be one of {', '.join(FORMATS)}")
    tokenizer = load_tokenizer(folder, options)
    context = context_length(config, options)
    vocab_size, end = tokenizer.fast.get_vocab_size(), tokenizer.fast.token_to_id(TURN_END)
    info = ModelInfo(
        model_type=MODEL_TYPE, context_length=context, vocab_size=vocab_size,
        stop_tokens=frozenset([end]), fingerprint=fingerprint(folder, options),
        weights_bytes=4 * vocab_size, precision="float32", chat_template=tokenizer.chat_template,
    )  # fmt: skip
    return ScriptedModel(tokenizer.within(context), info, calls)


FAMILY = ModelFamily(
    "scripted", lambda config: 10 * (config.get("model_type") == MODEL_TYPE), load,
    serves="models that follow a script in the prompt",
)  # fmt: skip


@hookimpl
def mlx_model_families() -> Iterable[ModelFamily]:
    yield FAMILY
