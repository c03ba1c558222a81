"""A plugin whose models fail as a test has written beside them; installed by `served_group`.

A model folder names in its config, as `faulty`, the plugin that serves it. `fault.json` in that
folder is one fault: `rank`, `at` (`load`, `prefill`, `decode`, `draw`, `first draw`, `embed`),
`least` (tokens before a chunk of a prefill, rows of a decode step) and `do` (`raise`, `hang`, or
the name of a signal that the rank sends itself). It happens once: whoever meets it takes it away.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mlx_provider import LoadedModel, LoadOptions, ModelFamily, ReasoningParser, hookimpl
from mlx_provider.records import Drafter
from mlx_provider.records.reading import Reading, TextReader

mlx_provider_api = 1

HANGS_AFTER = 15.0
"""Seconds; the product's own limit is too long for a test."""
RANK = int(os.environ.get("MLX_RANK", "0"))


def meet(folder: Path, at: str, size: int = 0) -> None:
    """Fail here, if that is what the test wants."""
    file = folder / "fault.json"
    try:
        fault = json.loads(file.read_text())
    except FileNotFoundError:  # another rank may have met it just now
        return
    if (fault["rank"], fault["at"]) != (RANK, at) or size < fault["least"]:
        return
    file.rename(folder / "met.json")
    if fault["do"] == "raise":
        raise ArithmeticError(f"a scripted fault in {at}")
    if fault["do"] == "hang":
        threading.Event().wait()
    os.kill(os.getpid(), signal.Signals[fault["do"]])


def load(folder: Path, options: LoadOptions) -> LoadedModel:
    """As the plugin that the config names, in a class of its own that meets faults."""
    from mlx_provider.engine.step import draw as drawing
    from mlx_provider_ranks import watch

    draw = drawing.draw

    def drawn(logits: Any, rows: Any, *more: Any) -> Any:
        first = not any(row.tokens for row in rows)
        meet(folder, "first draw" if first else "draw", len(rows))
        return draw(logits, rows, *more)

    vars(drawing)["draw"] = drawn
    watch.WORK_LIMIT = HANGS_AFTER
    meet(folder, "load")
    plugin = import_module(json.loads((folder / "config.json").read_text())["faulty"])
    made = next(iter(plugin.mlx_model_families())).load(folder, options)
    kind = type(made)

    class Faulty(kind):  # type: ignore[valid-type, misc]
        def prefill(self, chunk: Any) -> Any:
            meet(folder, "prefill", chunk.start)
            return super().prefill(chunk)

        def decode(self, tokens: Any, *more: Any, **named: Any) -> Any:
            meet(folder, "decode", tokens.shape[0])
            return super().decode(tokens, *more, **named)

        def embed_in_slices(self, spans: Any) -> Any:
            for made in super().embed_in_slices(spans):
                meet(folder, "embed")
                yield made

    object.__setattr__(made, "__class__", Faulty)
    return made  # type: ignore[no-any-return]


def matches(config: Mapping[str, Any]) -> int:
    return 100 if "faulty" in config else 0


@hookimpl
def mlx_model_families() -> Iterator[ModelFamily]:
    yield ModelFamily("faulty", matches, load)


def _odd_end(reader: TextReader, tools: Any) -> Reading[None]:
    """Text as it is, then what is no text, which a reply finds as it ends."""
    yield from reader.pass_until((), reader.content)
    reader.content(3)  # type: ignore[arg-type]


@hookimpl
def mlx_reasoning_parsers() -> Iterator[ReasoningParser]:
    yield ReasoningParser("odd_end", "<odd>", "</odd>", whole=_odd_end)


def _start(*given: Any) -> Any:
    raise ArithmeticError("a scripted fault of a drafter")


@hookimpl
def mlx_drafters() -> Iterator[Drafter]:
    yield Drafter("faulty", lambda *given: "", _start)
    yield Drafter("unfit", lambda *given: "it does not like this model", _start)
