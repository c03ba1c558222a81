"""Which drafter guesses ahead for a model: the operator's, or the best that can."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from ..engine.speculation.policy import Policy
from ..engine.speculation.speculation import Speculation
from ..errors import wrong_option
from ..isolation import Isolation
from ..protocol.messages import ModelOptions
from ..records import Drafter, DraftOptions, LoadedModel, ShowsHidden
from ..registry import PluginRegistry

log = logging.getLogger(__name__)

OFF, AUTO = "off", "auto"
UNNAMED = (OFF, AUTO)
"""What an operator says who names no drafter."""
BLIND = "the model does not show its hidden states"


def draft_kind(options: ModelOptions) -> str:
    """What engines of the same weights are told apart by, beside their KV cache."""
    if options.drafter in UNNAMED and not options.draft_model and not options.draft_tokens:
        return "" if options.drafter == AUTO else OFF
    return f"{options.drafter} {options.draft_model or ''} {options.draft_tokens or ''}"


def check_drafts(options: ModelOptions) -> None:
    """Before anything is loaded for the sake of a wrong option. Raises `BadRequest`."""
    if options.reproducible and (options.drafter not in UNNAMED or options.draft_model):
        raise wrong_option("drafter", "passes of a reproducible model have no room for drafts")
    if options.draft_model is not None and not _folder(options.draft_model).is_dir():
        told = f"no folder {options.draft_model!r} on the engine's machine"
        raise wrong_option("draft_model", told)


def speculation_of(
    registry: PluginRegistry, folder: Path, model: LoadedModel, options: ModelOptions
) -> tuple[Speculation | None, str]:
    """Speculation with the drafter that the operator names, else with the best that can, and the
    drafter's name (engine thread).

    Raises `BadRequest` where the named one cannot.
    """
    if options.drafter == OFF:
        return None, ""
    given = DraftOptions(
        None if options.draft_model is None else _folder(options.draft_model), options.extra
    )
    if options.drafter != AUTO:
        drafter = registry.drafter(options.drafter)
        if problem := _problem(drafter, folder, model, given):
            raise wrong_option("drafter", f"{drafter.name} cannot draft for this model: {problem}")
        return _started(drafter, folder, model, given, options), drafter.name
    return _first(registry.automatic_drafters(), folder, model, given, options)


def _first(
    drafters: Iterable[Drafter],
    folder: Path,
    model: LoadedModel,
    given: DraftOptions,
    options: ModelOptions,
) -> tuple[Speculation | None, str]:
    for drafter in drafters:
        with Isolation() as tried:
            if problem := _problem(drafter, folder, model, given):
                log.log(_loudness(given), "drafter %s is not used: %s", drafter.name, problem)
                continue
            return _started(drafter, folder, model, given, options), drafter.name
        if tried.fault is not None:
            log.warning("drafter %s is left out: %s", drafter.name, tried.fault.told)
    return None, ""


def _loudness(given: DraftOptions) -> int:
    """Who has given a model to draft with wants to know why it does not."""
    return logging.INFO if given.model is None else logging.WARNING


def _problem(drafter: Drafter, folder: Path, model: LoadedModel, given: DraftOptions) -> str:
    if drafter.hidden and not isinstance(model, ShowsHidden):
        return BLIND
    return drafter.refuses(folder, model, given)


def _started(
    drafter: Drafter, folder: Path, model: LoadedModel, given: DraftOptions, options: ModelOptions
) -> Speculation:
    policy = Policy() if options.draft_tokens is None else Policy(most=options.draft_tokens)
    drafting = drafter.start(folder, model, given)
    return Speculation(
        drafting,
        vocab=model.info.vocab_size,
        hidden=drafter.hidden,
        media=drafter.media,
        policy=policy,
    )


def _folder(name: str) -> Path:
    return Path(name).expanduser()
