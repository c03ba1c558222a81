"""Starts the drafters of a model, the operator's or all that support it, and its sparse prefill."""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ..engine.execution.grouped_kv import MixedChunk
from ..engine.sparse_prefill import SparsePrefill, run_alone
from ..engine.speculation.speculation import Source, Speculation, source_of
from ..errors import MLXProviderError, wrong_option
from ..families.logits import failure
from ..isolation import Fault, attempt, is_machine_error
from ..logs import Trace
from ..protocol.health import JOINED
from ..protocol.requests import ModelOptions
from ..records import Drafter, DraftOptions, HiddenStatesModel, LoadedModel, ScoresPrompts
from ..registry import PluginRegistry
from ..upstream.cache_classes import can_skip, layers_of, sparse
from .probe import Probe
from .solo_rows import MakeCache, decoding_row, some_tokens
from .weight_files import check_folder

log = logging.getLogger(__name__)

OFF, AUTO = "off", "auto"
UNNAMED = (OFF, AUTO)


@dataclass(frozen=True)
class LoadedDrafters:
    speculation: Speculation | None = None
    drafter: str = ""
    """Names, best first, joined by `JOINED`. Empty: none."""
    nbytes: int = 0
    """Bytes of its weights, and those that rows may add."""

    @property
    def scorer(self) -> ScoresPrompts | None:
        sources = [] if self.speculation is None else self.speculation.sources
        found = (source.drafting for source in sources)
        return next((source for source in found if isinstance(source, ScoresPrompts)), None)


class Running(NamedTuple):
    drafter: Drafter
    source: Source
    nbytes: int


def load_drafters(
    registry: PluginRegistry,
    folder: Path,
    model: LoadedModel,
    options: ModelOptions,
    room: int | None = None,
) -> LoadedDrafters:
    """The drafter that the operator names, else all that support the model (engine thread). Of
    those that read hidden states only the best starts, because a pass returns one kind of states.

    `room`: bytes for them. Raises `BadRequest` if the named one does not support the model."""
    if options.drafter == OFF:
        return LoadedDrafters()
    named = options.draft_model
    draft_model = None if named is None else Path(named).expanduser()
    given = DraftOptions(draft_model, room, options.extra, options.sparse_prefill is not None)
    if options.drafter == AUTO:
        return _combine(_start_able(registry.automatic_drafters(), folder, model, given), model)
    drafter = registry.drafter(options.drafter)
    try:
        return _combine([_start(drafter, folder, model, given)], model)
    except Unfit as error:
        summary = f"{drafter.name} cannot draft for this model: {error}"
        raise wrong_option("drafter", summary) from None


class Unfit(Exception):
    pass


def _combine(started: Sequence[Running], model: LoadedModel) -> LoadedDrafters:
    if not started:
        return LoadedDrafters()
    names = JOINED.join(run.drafter.name for run in started)
    speculation = Speculation(*[run.source for run in started], vocab=model.info.vocab_size)
    return LoadedDrafters(speculation, names, sum(run.nbytes for run in started))


def _start_able(
    drafters: Sequence[Drafter], folder: Path, model: LoadedModel, given: DraftOptions
) -> list[Running]:
    """Start the drafters that support the model, best first. Of those that read the operator's
    draft model, only the first that accepts it."""
    given_one = [d for d in drafters if d.reads_draft_model and given.model is not None]
    started: list[Running] = []
    refusals: list[str] = []
    for drafter in (*given_one, *(d for d in drafters if d not in given_one)):
        first = drafter in given_one
        if (first and started) or (drafter.hidden and any(run.drafter.hidden for run in started)):
            continue
        taken = sum(run.nbytes for run in started)
        left = given if given.room is None else replace(given, room=given.room - taken)
        found = attempt(partial(_start, drafter, folder, model, left))
        if isinstance(found, Running):
            started.append(found)
        elif isinstance(found.error, Unfit):
            log.info("drafter %s is not used: %s", drafter.name, found.error)
            refusals += [f"drafter {drafter.name}: {found.error}"] if first else []
        else:
            log.warning("%s%s", _why(drafter, found), Trace(f"\n{found.trace}"))
    if refusals and not any(run.drafter in given_one for run in started):
        log.warning("draft_model %s is not used: %s", given.model, "; ".join(refusals))
    return started


def _why(drafter: Drafter, fault: Fault) -> str:
    """The reason without details of the error, which stay in the traceback."""
    if isinstance(fault.error, MLXProviderError):
        return f"drafter {drafter.name} is not used: {fault.error.message}"
    cause = f"a fault of {f'plugin {fault.origin.plugin}' if fault.origin else 'its plugin'}"
    if is_machine_error(fault.error):
        cause = "its files, or memory or device of this machine"
    return f"drafter {drafter.name} is left out: it failed while it started ({cause})"


def _start(drafter: Drafter, folder: Path, model: LoadedModel, given: DraftOptions) -> Running:
    if drafter.hidden and not (isinstance(model, HiddenStatesModel) and model.has_hidden_states):
        raise Unfit("the model does not show its hidden states")
    if refusal := drafter.refuses(folder, model, given):
        raise Unfit(refusal)
    if given.model is not None:
        check_folder(given.model)
    before = mx.get_active_memory()
    drafting = drafter.start(folder, model, given)
    nbytes = max(0, mx.get_active_memory() - before) + drafter.keeps(drafting)
    if given.room is not None and nbytes > given.room:
        raise Unfit(f"it takes {nbytes} bytes beside the model, which leaves {given.room}")
    return Running(drafter, source_of(drafter, drafting, model), nbytes)


LENGTH, MOVED, AT_ONCE = 12, 70, 7
"""Tokens of the trial's prompt, its first position, and tokens of its first pass."""
NAME = "sparse_prefill"
LONG = 8192
"""Prompts of fewer tokens are prefilled whole."""


def sparse_prefill_of(
    options: ModelOptions,
    model: LoadedModel,
    make_cache: MakeCache,
    found: Probe,
    loaded: LoadedDrafters,
) -> SparsePrefill | None:
    """Engine thread. Raises `BadRequest` if the model or its drafters do not support it."""
    share = options.sparse_prefill
    if share is None:
        return None
    if why := problem(model, make_cache):
        raise wrong_option(NAME, f"this model's prompts can only be prefilled whole: {why}")
    if not found.mixes:
        why = "; ".join(found.notes) or f"their layout is {found.layout}"
        raise wrong_option(NAME, f"it needs rows that share passes; here {why}")
    scorer = loaded.scorer
    if scorer is None:
        who = f"drafter {loaded.drafter} cannot score" if loaded.drafter else "no drafter scores"
        raise wrong_option(NAME, f"{who} prompts: name a draft_model that is a whole model")
    # scoring ends before the prefill, so it may use the memory of the row's KV cache
    own, most = scorer.scored_token_bytes, found.memory.token_bytes
    if not scorer.longest_scored:
        why = "it keeps no prompt whole"
    elif own > most:
        why = f"it takes {own} bytes for each token of a prompt, the model itself {most}"
    if why:
        raise wrong_option(NAME, f"the draft model cannot score prompts: {why}")
    return SparsePrefill(scorer, share=share, least=LONG)


def problem(model: LoadedModel, make_cache: MakeCache) -> str:
    """Why no tokens of this model's prompts can be left out. Empty: they can. Engine thread."""
    kinds = {type(layer).__name__ for layer in layers_of(make_cache()) if not can_skip(layer)}
    if kinds:
        return f"its layers need every token ({', '.join(sorted(kinds))})"
    why = failure(lambda: _trial(model, make_cache))
    return why and f"a trial failed: {why}"


def _trial(model: LoadedModel, make_cache: MakeCache) -> str:
    """A prompt that starts at position `MOVED` must give the same result as one at 0. It does not
    if a model uses absolute positions or the number of cached tokens."""
    tokens = some_tokens(model, LENGTH, 1)
    alone = decoding_row(model, make_cache, tokens, 0)
    cache = sparse(make_cache())
    again = [*tokens, *tokens[: len(alone.logits)]]
    ends = [0, AT_ONCE, *range(LENGTH, len(again) + 1)]
    found = [_append(model, cache, again, *chunk) for chunk in itertools.pairwise(ends)]
    return alone.problem(found[2:])


def _append(
    model: LoadedModel, cache: list[Any], tokens: Sequence[int], start: int, stop: int
) -> mx.array:
    places = range(start + MOVED, stop + MOVED)
    logits = run_alone(model, MixedChunk(tokens[start:stop], places, cache, sparse=True))
    mx.eval(logits)
    return logits
