"""A model that writes a script: text, reasoning and calls of tools.

Tests of a client, a parser, a gateway or a plugin need a model whose next words are known:

    from mlx_provider.testing.scripted import Call, Step, build, environment, script

    folder = build(tmp_path / "model", "json", context_length=32_768)
    both = (Call("read", {"path": "a"}), Call("read", {"path": "b"}))
    prompt = script(Step("Looking.", (Call("bash", {"command": "ls"}),)), Step(calls=both))

The script is in the user's message; the client may write anything around it. The first step
answers that message, the second what follows the first tool results, and so on; then the model
ends with a text that quotes the last tool result. Without a script it repeats the question. A
request for a summary, with which coding agents make room, gets one with the rest of the script.

It reads what it says only from its KV cache, so that a wrong cache gives wrong words. This module
is also the plugin with the family: other processes find it by `environment(folder)`."""

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
CONTEXT = 200_000
MERGES = 16_000
BEGIN, END = "SCRIPT: ", " :END"
WRITTEN = re.compile(r"SCRIPT:(.*?):END", re.DOTALL)
TURN, TURN_END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
ADDED = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>".split()
"""Tokens of their own that decoded text keeps."""
RESULT = "<tool_response>\n"
TOOLS = "\n<tools>\n"


class BadScript(ValueError):
    """The text between the marks is not a list of steps."""


@dataclass(frozen=True)
class Call:
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    say: str = ""
    calls: tuple[Call, ...] = ()
    """All at once."""
    think: str = ""
    count: int = 0
    """The numbers from 1 up to this one, after the text."""
    slow: float = 0.0
    """Seconds for each token of the reply."""
    prefill: float = 0.0
    """Seconds for its whole prompt, by tokens: those from the prefix cache take none."""
    since: float = 0.0
    """A time, in seconds since 1970, that `prefill` counts from. Prompts of one engine that count
    from one moment take their time side by side."""

    @property
    def text(self) -> str:
        return self.say + " ".join(map(str, range(1, self.count + 1)))

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Step:
        try:
            calls = tuple(Call(**call) for call in fields.get("calls", ()))
            return cls(**{**fields, "calls": calls})
        except TypeError as error:
            raise BadScript(str(error)) from None


def script(*steps: Step) -> str:
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
"""By name: `json`, as Hermes and Qwen have it; `tags`, as Qwen's coders do."""


def build(
    folder: Path, calls: str = "json", *, context_length: int = CONTEXT, merges: int = MERGES
) -> Path:
    """`calls`: one of `FORMATS`. Its tokens are learnt from Python's own library, in a second or
    two, and have three letters on average; of 2,000 `merges`, learnt in a fifth of a second, two.
    """
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
        vocab_size=len(special) + 256 + merges,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in library)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ADDED])
    tokenizer.save(str(folder / "tokenizer.json"))
    own = {"model_max_length": 1_000_000, "eos_token": TURN_END, "pad_token": TEXT_END}
    own |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(own, indent=1))


def environment(folder: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables with which a process finds the family in addition to the installed plugins. Writes
    into `folder` the files that pip would install for this plugin, and puts the folder first on the
    `PYTHONPATH` of `environ`."""
    info = folder / f"{DISTRIBUTION}-{__version__}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    head = f"Metadata-Version: 2.1\nName: mlx-provider-scripted\nVersion: {__version__}\n"
    (info / "METADATA").write_text(head)
    (info / "entry_points.txt").write_text(f"[mlx_provider]\nscripted = {__name__}\n")
    before = environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [os.fspath(folder), before]))}


def load(folder: Path, options: LoadOptions) -> LoadedModel:
    from ...families.checkpoint import context_length, fingerprint, read_json
    from ...families.tokenizer import load_tokenizer
    from .model import ScriptedModel

    config = read_json(folder / "config.json")
    calls = FORMATS.get(config.get("calls", ""))
    if calls is None:
        raise UnsupportedModel(f"calls of {folder} must be one of {', '.join(FORMATS)}")
    tokenizer = load_tokenizer(folder, options)
    context = context_length(config, options)
    info = ModelInfo(
        model_type=MODEL_TYPE,
        context_length=context,
        vocab_size=tokenizer.fast.get_vocab_size(),
        stop_tokens=frozenset([tokenizer.fast.token_to_id(TURN_END)]),
        fingerprint=fingerprint(folder, options),
        weights_bytes=4 * tokenizer.fast.get_vocab_size(),
        precision="float32",
        chat_template=tokenizer.chat_template,
    )
    return ScriptedModel(tokenizer.within(context), info, calls)


FAMILY = ModelFamily(
    "scripted",
    lambda config: 10 * (config.get("model_type") == MODEL_TYPE),
    load,
    serves="models that follow a script in the prompt",
)


@hookimpl
def mlx_model_families() -> Iterable[ModelFamily]:
    yield FAMILY
