"""Selects the drafter of a model: the operator's, or the best one that supports the model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ..engine.speculation.speculation import Speculation, speculation_of
from ..errors import MLXProviderError, wrong_option
from ..fault_origin import of_the_machine
from ..isolation import Fault, Isolation
from ..log_lines import Trace
from ..protocol.options import ModelOptions
from ..records import Drafter, DraftOptions, LoadedModel, ShowsHidden
from ..registry import PluginRegistry
from .folder_check import check_folder

log = logging.getLogger(__name__)

OFF, AUTO = "off", "auto"
UNNAMED = (OFF, AUTO)
"""Values of the option that name no drafter."""
BLIND = "the model does not show its hidden states"


def draft_kind(options: ModelOptions) -> str:
    """Distinguishes engines of the same weights, in addition to their KV cache."""
    if options.drafter in UNNAMED and not options.draft_model:
        return "" if options.drafter == AUTO else OFF
    return f"{options.drafter} {options.draft_model or ''}"


def check_drafts(options: ModelOptions) -> None:
    """Check options before anything is loaded. Raises `BadRequest`."""
    if options.reproducible and (options.drafter not in UNNAMED or options.draft_model):
        raise wrong_option("drafter", "passes of a reproducible model have no room for drafts")
    if options.draft_model is not None and not _folder(options.draft_model).is_dir():
        summary = f"no folder {options.draft_model!r} on the engine's machine"
        raise wrong_option("draft_model", summary)


@dataclass(frozen=True)
class Drafts:
    """The drafter of a model."""

    speculation: Speculation | None = None
    drafter: str = ""
    """Its name. Empty: none."""
    nbytes: int = 0
    """Bytes that it has loaded, and may store for rows."""


def drafts_of(
    registry: PluginRegistry,
    folder: Path,
    model: LoadedModel,
    options: ModelOptions,
    room: int | None = None,
    *,
    whole: bool = True,
) -> Drafts:
    """The drafter that the operator names, else the best that supports the model (engine thread).

    room: bytes that it may use; `whole`: the model is not split over machines. Raises `BadRequest`
    if the named one does not support the model.
    """
    if options.drafter == OFF:
        return Drafts()
    draft_model = None if options.draft_model is None else _folder(options.draft_model)
    given = DraftOptions(draft_model, room, options.extra, options.sparse_prefill is not None)
    if options.drafter == AUTO:
        able = [d for d in registry.automatic_drafters() if whole or not d.hidden]
        return _first(able, folder, model, given, options)
    drafter = registry.drafter(options.drafter)
    if drafter.hidden and not whole:
        raise wrong_option("drafter", f"{drafter.name} drafts for models that are not split")
    try:
        return _started(drafter, folder, model, given, options)
    except Unfit as error:
        summary = f"{drafter.name} cannot draft for this model: {error}"
        raise wrong_option("drafter", summary) from None


class Unfit(Exception):
    """A drafter does not support a model."""


def _first(
    drafters: Sequence[Drafter],
    folder: Path,
    model: LoadedModel,
    given: DraftOptions,
    options: ModelOptions,
) -> Drafts:
    given_one = [d for d in drafters if d.reads_draft_model and given.model is not None]
    others = [d for d in drafters if d not in given_one]
    found, refusals = _try(given_one, folder, model, given, options)
    if found is None and refusals:
        log.warning("draft_model %s is not used: %s", given.model, "; ".join(refusals))
    if found is None:
        found, _ = _try(others, folder, model, given, options)
    return found or Drafts()


def _try(
    drafters: Sequence[Drafter],
    folder: Path,
    model: LoadedModel,
    given: DraftOptions,
    options: ModelOptions,
) -> tuple[Drafts | None, list[str]]:
    """The first that starts, and why those before it do not support the model."""
    refusals: list[str] = []
    for drafter in drafters:
        with Isolation() as tried:
            return _started(drafter, folder, model, given, options), refusals
        fault = tried.fault
        if fault is not None and isinstance(fault.error, Unfit):
            refusals.append(f"drafter {drafter.name}: {fault.error}")
            log.info("drafter %s is not used: %s", drafter.name, fault.error)
        elif fault is not None:
            log.warning("%s%s", _why(drafter, fault), Trace(f"\n{fault.trace}"))
    return None, refusals


def _why(drafter: Drafter, fault: Fault) -> str:
    """Why a drafter is not used, as text. Details of the error stay in the traceback."""
    if isinstance(fault.error, MLXProviderError):
        return f"drafter {drafter.name} is not used: {fault.error.message}"
    cause = f"a fault of {fault.origin or 'its plugin'}"
    if of_the_machine(fault.error):
        cause = "its files, or memory or device of this machine"
    return f"drafter {drafter.name} is left out: it failed while it started ({cause})"


def _started(
    drafter: Drafter, folder: Path, model: LoadedModel, given: DraftOptions, options: ModelOptions
) -> Drafts:
    """Start a drafter. Raises `Unfit`, the errors of `check_folder`, and those of the drafter."""
    if problem := _problem(drafter, folder, model, given):
        raise Unfit(problem)
    if given.model is not None:
        check_folder(given.model)
    before = mx.get_active_memory()
    drafting = drafter.start(folder, model, given)
    nbytes = max(0, mx.get_active_memory() - before) + drafter.keeps(drafting)
    if given.room is not None and nbytes > given.room:
        raise Unfit(f"it takes {nbytes} bytes beside the model, which leaves {given.room}")
    return Drafts(speculation_of(drafter, drafting, model), drafter.name, nbytes)


def _problem(drafter: Drafter, folder: Path, model: LoadedModel, given: DraftOptions) -> str:
    if drafter.hidden and not (isinstance(model, ShowsHidden) and model.shows_hidden):
        return BLIND
    return drafter.refuses(folder, model, given)


def _folder(name: str) -> Path:
    return Path(name).expanduser()
