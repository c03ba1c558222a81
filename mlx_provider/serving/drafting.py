"""Starts a model's drafters: the one that the operator names, or all that support the model. Also
sets up sparse prefill, which leaves unimportant tokens of a long prompt out."""

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
"""Values of the option `drafter` that name no drafter."""


@dataclass(frozen=True)
class LoadedDrafters:
    speculation: Speculation | None = None
    drafter: str = ""
    """Names, best first, joined by `JOINED`. Empty: none."""
    nbytes: int = 0  # bytes of the drafters' weights, and the most that they keep for rows

    @property
    def scorer(self) -> ScoresPrompts | None:
        """The best drafter that scores prompts for sparse prefill. `None`: none does."""
        sources = [] if self.speculation is None else self.speculation.sources
        drafters = (source.drafting for source in sources)
        return next((drafter for drafter in drafters if isinstance(drafter, ScoresPrompts)), None)


class Running(NamedTuple):
    """A drafter that has started."""

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
    """Start the drafter that the operator names, else all that support the model (engine thread).
    Of those that read hidden states only the best starts: a pass returns one kind of states.
    `room`: bytes for them. Raises `BadRequest` if the named one does not support the model."""
    if options.drafter == OFF:
        return LoadedDrafters()
    draft_model = None if options.draft_model is None else Path(options.draft_model).expanduser()
    scores = options.sparse_prefill is not None
    draft_options = DraftOptions(draft_model, room, options.extra, scores)
    if options.drafter == AUTO:
        drafters = registry.automatic_drafters()
        running = _start_supported(drafters, folder, model, draft_options)
    else:
        drafter = registry.drafter(options.drafter)
        try:
            running = [_start(drafter, folder, model, draft_options)]
        except Unfit as error:
            summary = f"{drafter.name} cannot draft for this model: {error}"
            raise wrong_option("drafter", summary) from None
    if not running:
        return LoadedDrafters()
    names = JOINED.join(run.drafter.name for run in running)
    speculation = Speculation(*[run.source for run in running], vocab=model.info.vocab_size)
    return LoadedDrafters(speculation, names, sum(run.nbytes for run in running))


class Unfit(Exception):
    """A drafter cannot draft for this model. Its text says why."""


def _start_supported(
    drafters: Sequence[Drafter], folder: Path, model: LoadedModel, options: DraftOptions
) -> list[Running]:
    """Start the drafters that support the model: first those that read the operator's draft model,
    of which only one starts, then the others, each best first."""
    readers = [d for d in drafters if d.reads_draft_model and options.model is not None]
    running: list[Running] = []
    refusals: list[str] = []
    for drafter in (*readers, *(d for d in drafters if d not in readers)):
        reads_draft_model = drafter in readers
        lacks_states = drafter.hidden and any(run.drafter.hidden for run in running)
        if lacks_states or (reads_draft_model and running):
            continue
        used_bytes = sum(run.nbytes for run in running)
        room = None if options.room is None else options.room - used_bytes
        result = attempt(partial(_start, drafter, folder, model, replace(options, room=room)))
        if isinstance(result, Running):
            running.append(result)
        elif isinstance(result.error, Unfit):
            log.info("drafter %s is not used: %s", drafter.name, result.error)
            if reads_draft_model:
                refusals.append(f"drafter {drafter.name}: {result.error}")
        else:
            log.warning("%s%s", _failure_text(drafter, result), Trace(f"\n{result.trace}"))
    if refusals and not any(run.drafter in readers for run in running):
        log.warning("draft_model %s is not used: %s", options.model, "; ".join(refusals))
    return running


def _failure_text(drafter: Drafter, fault: Fault) -> str:
    """Why a drafter did not start, without details of the error, which stay in the traceback."""
    if isinstance(fault.error, MLXProviderError):
        return f"drafter {drafter.name} is not used: {fault.error.message}"
    cause = f"a fault of plugin {fault.origin.plugin}" if fault.origin else "a fault of its plugin"
    if is_machine_error(fault.error):
        cause = "its files, or memory or device of this machine"
    return f"drafter {drafter.name} is left out: it failed while it started ({cause})"


def _start(drafter: Drafter, folder: Path, model: LoadedModel, options: DraftOptions) -> Running:
    if drafter.hidden and not (isinstance(model, HiddenStatesModel) and model.has_hidden_states):
        raise Unfit("the model does not show its hidden states")
    if refusal := drafter.refuses(folder, model, options):
        raise Unfit(refusal)
    if drafter.reads_draft_model and options.model is not None:
        check_folder(options.model)
    before = mx.get_active_memory()
    drafting = drafter.start(folder, model, options)
    nbytes = max(0, mx.get_active_memory() - before) + drafter.keeps(drafting)
    if options.room is not None and nbytes > options.room:
        raise Unfit(f"it takes {nbytes} bytes beside the model, which leaves {options.room}")
    return Running(drafter, source_of(drafter, drafting, model), nbytes)


# ---- sparse prefill
SPARSE = "sparse_prefill"
LONG = 8192
"""Prompts of fewer tokens are prefilled whole."""
TRIAL_TOKENS, FIRST_CHUNK, FIRST_POSITION = 12, 7, 70
"""Of the trial: tokens of its prompt and of its first chunk, position of its first token."""


def sparse_prefill_of(
    options: ModelOptions,
    model: LoadedModel,
    make_cache: MakeCache,
    found: Probe,
    loaded: LoadedDrafters,
) -> SparsePrefill | None:
    """Sparse prefill, if the options demand it, else `None` (engine thread). Raises `BadRequest` if
    the model or its drafters do not support sparse prefill."""
    share = options.sparse_prefill
    if share is None:
        return None
    if why := problem(model, make_cache):
        raise wrong_option(SPARSE, f"this model's prompts can only be prefilled whole: {why}")
    if not found.mixes:
        why = "; ".join(found.notes) or f"their layout is {found.layout}"
        raise wrong_option(SPARSE, f"it needs rows that share passes; here {why}")
    scorer = loaded.scorer
    if scorer is None:
        who = f"drafter {loaded.drafter} cannot score" if loaded.drafter else "no drafter scores"
        raise wrong_option(SPARSE, f"{who} prompts: name a draft_model that is a whole model")
    # scoring ends before the prefill, so it may use the memory of the row's KV cache
    scorer_bytes, model_bytes = scorer.scored_token_bytes, found.memory.token_bytes
    why = ""
    if not scorer.longest_scored:
        why = "it keeps no prompt whole"
    elif scorer_bytes > model_bytes:
        why = f"it takes {scorer_bytes} bytes for each token of a prompt, the model {model_bytes}"
    if why:
        raise wrong_option(SPARSE, f"the draft model cannot score prompts: {why}")
    return SparsePrefill(scorer, share=share, least=LONG)


def problem(model: LoadedModel, make_cache: MakeCache) -> str:
    """Why no tokens of this model's prompts can be left out. Empty: they can. Engine thread."""
    kinds = {type(layer).__name__ for layer in layers_of(make_cache()) if not can_skip(layer)}
    if kinds:
        return f"its layers need every token ({', '.join(sorted(kinds))})"
    why = failure(lambda: _trial(model, make_cache))
    return why and f"a trial failed: {why}"


def _trial(model: LoadedModel, make_cache: MakeCache) -> str:
    """Why a sparse prompt gives wrong logits; empty: it does not. One that starts at position
    `FIRST_POSITION` must give the same logits as at 0. They differ if a model uses absolute
    positions, or the number of cached tokens."""
    prompt = some_tokens(model, TRIAL_TOKENS, 1)
    dense = decoding_row(model, make_cache, prompt, 0)
    tokens = [*prompt, *prompt[: len(dense.logits)]]
    cache = sparse(make_cache())
    ends = [0, FIRST_CHUNK, *range(TRIAL_TOKENS, len(tokens) + 1)]
    logits = [_append(model, cache, tokens, *chunk) for chunk in itertools.pairwise(ends)]
    return dense.problem(logits[2:])  # the first two chunks are the prompt


def _append(
    model: LoadedModel, cache: list[Any], tokens: Sequence[int], start: int, stop: int
) -> mx.array:
    """Run `tokens[start:stop]`. Returns the logits of the last one."""
    positions = range(FIRST_POSITION + start, FIRST_POSITION + stop)
    logits = run_alone(model, MixedChunk(tokens[start:stop], positions, cache, sparse=True))
    mx.eval(logits)
    return logits
