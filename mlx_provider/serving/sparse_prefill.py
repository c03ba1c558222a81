"""The operator's choice of sparse prefill for long prompts, and its requirements."""

from __future__ import annotations

from ..engine.execution.probe import Probe
from ..engine.sparse_prefill.passes import MakeCache, problem
from ..engine.sparse_prefill.sparse_prefill import SparsePrefill
from ..errors import BadRequest, wrong_option
from ..protocol.options import ModelOptions
from ..records import LoadedModel, ScoresPrompts
from .drafting import Drafts

NAME = "sparse_prefill"
LONG = 8192
"""Tokens."""


def sparse_kind(options: ModelOptions) -> str:
    if options.sparse_prefill is None:
        return ""
    return f"{options.sparse_prefill} of long prompts"


def check_sparse_prefill(options: ModelOptions) -> None:
    """Raises `BadRequest`."""
    if options.sparse_prefill is None:
        return
    if options.reproducible:
        raise wrong_option(NAME, "a reproducible model computes every token of a prompt")
    if options.kv_bits is not None:
        raise wrong_option(NAME, "no tokens can be left out of a quantised KV cache (kv_bits)")
    if options.drafter == "off":
        raise wrong_option(NAME, "a draft model finds out which tokens matter; drafter is off")


def sparse_prefill_of(
    options: ModelOptions,
    model: LoadedModel,
    make_cache: MakeCache,
    found: Probe,
    drafts: Drafts,
) -> SparsePrefill | None:
    """Engine thread. Raises `BadRequest` if the model or its drafters do not support it."""
    share = options.sparse_prefill
    if share is None:
        return None
    if why := problem(model, make_cache):
        raise wrong_option(NAME, f"this model's prompts can only be prefilled whole: {why}")
    if not found.mixes:
        raise wrong_option(NAME, f"it needs rows that share passes; here {_how(found)}")
    scorer = drafts.scorer
    if scorer is None:
        who = f"drafter {drafts.drafter} cannot score" if drafts.drafter else "no drafter scores"
        raise wrong_option(NAME, f"{who} prompts: name a draft_model that is a whole model")
    _check_scorer(scorer, found)
    return SparsePrefill(scorer, share=share, least=LONG)


def _check_scorer(scorer: ScoresPrompts, found: Probe) -> None:
    """Scoring may use the row's memory: the row is empty until it has ended."""
    if not scorer.longest_scored:
        raise _unfit("it keeps no prompt whole")
    own, most = scorer.scored_token_bytes, found.memory.token_bytes
    if own > most:
        raise _unfit(f"it takes {own} bytes for each token of a prompt, the model itself {most}")


def _unfit(why: str) -> BadRequest:
    return wrong_option(NAME, f"the draft model cannot score prompts: {why}")


def _how(found: Probe) -> str:
    return "; ".join(found.notes) or f"their layout is {found.layout}"
