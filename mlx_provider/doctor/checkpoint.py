"""A model's files, memory and plugins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..config import PREFIX
from ..engine.memory import memory_limit
from ..families.checkpoint import named_context
from ..families.estimate import DTYPE_BYTES, Footprint, context_that_fits, footprint, text_fields
from ..gateway.models import size
from ..serving.weight_files import broken_files, stored_tensors, weights_dtype, weights_estimate
from .findings import Finding
from .machine import room
from .subject import Subject

AGENT = 32_768
"""Least context for a coding agent: its tools alone take 7,000 to 20,000 tokens."""
SMALLER = (
    "take a smaller or more quantised model, set model_info.mlx.kv_bits: 8, close other "
    f"programs, or raise {PREFIX}MEMORY_LIMIT"
)


def found(subject: Subject) -> Iterator[Finding]:
    """Raises the errors of the search."""
    if subject.folder is not None:
        yield Finding("model.found", "ok", f"{subject.model} is in {subject.folder}")
    elif subject.outline is not None:
        weights = size(subject.outline.weight_bytes)
        summary = f"{subject.model} is on the Hub: the first request downloads {weights}"
        yield Finding("model.found", "note", summary)
    else:
        summary = f"{subject.model} is not on this machine, and the Hub is not asked offline"
        remedy = "go online, or name a model that is here (`demo` always is)"
        yield Finding("model.found", "fail", summary, remedy)


def files(subject: Subject) -> Iterator[Finding]:
    if subject.folder is None:
        return
    problems = list(_problems(subject.folder))
    for problem in problems:
        remedy = "download or convert the model again"
        yield Finding("model.files", "fail", f"{subject.folder}: {problem}", remedy)
    if not problems:
        yield Finding("model.files", "ok", "weights, tokenizer and config are whole")


def memory(subject: Subject) -> Iterator[Finding]:
    if not subject.config:
        return
    own = named_context(text_fields(subject.config))
    taken, limit = expected(subject), room(subject.settings)
    fits = context_that_fits(taken, limit, own)
    summary = (
        f"weights take {size(taken.weights)} of {size(limit)}, and the KV cache takes "
        f"{taken.kv_per_token:,} bytes per token: a context of {fits:,} tokens fits"
    )
    if taken.weights > limit:
        summary = f"weights take {size(taken.weights)}, but only {size(limit)} is available"
        yield Finding("model.memory", "fail", summary, SMALLER)
    elif fits < min(AGENT, own or AGENT):
        yield Finding("model.memory", "warn", f"{summary}: too few for coding agents", SMALLER)
    elif own is not None and fits < own:
        yield Finding("model.memory", "note", f"{summary}, and the model supports {own:,}")
    else:
        yield Finding("model.memory", "ok", summary)
    if own is not None and own < AGENT:
        summary = (
            f"the model's own context is {own:,} tokens: coding agents need {AGENT:,} and more"
        )
        yield Finding("model.context", "note", summary)


def family(subject: Subject) -> Iterator[Finding]:
    if not subject.config:
        return
    found, plugin = subject.registry.family_for(subject.config)
    summary = (
        f"family {found.name} of plugin {plugin.name} serves {subject.config.get('model_type')}"
    )
    yield Finding("model.family", "ok", summary)
    rivals = subject.registry.rivals(subject.config)
    if rivals:
        remedy = "uninstall one, or name the plugins that you want in MLX_PROVIDER_PLUGINS"
        yield Finding("model.family_claims", "warn", rivals, remedy)


def parsers(subject: Subject) -> Iterator[Finding]:
    formats = subject.formats
    if formats is None:
        return
    if formats.template is None:
        summary = "the model has no chat template: only text completions are of use"
        remedy = "put the chat_template.jinja of the model's maker into its folder"
        yield Finding("model.formats", "fail", summary, remedy)
        return
    if formats.tool_parser is None:
        general = formats.any_parser.name if formats.any_parser else "nobody"
        summary = f"the chat template shows no known tool format: calls are read by {general}"
        remedy = "name one with model_info.mlx.tool_parser (`mlx-provider plugins` lists them)"
        yield Finding("model.tool_parser", "warn", summary, remedy)
    else:
        yield Finding("model.tool_parser", "ok", f"calls are read as {formats.tool_parser.name}")
    thoughts = formats.reasoning_parser
    summary = "the model shows no thoughts" if thoughts is None else f"thoughts are {thoughts.name}"
    yield Finding("model.reasoning_parser", "ok", summary)


def expected(subject: Subject) -> Footprint:
    """Raises `BadRequest` for an incomplete config."""
    folder = subject.folder
    if folder is None:
        weights = subject.outline.weight_bytes if subject.outline is not None else 0
        return footprint(subject.config, weights)
    limit = memory_limit(subject.settings.memory_limit)
    dtype = weights_dtype("auto", weights_estimate(folder, expanded=4), limit)
    expanded = None if dtype is None else DTYPE_BYTES[dtype]
    weights = weights_estimate(folder, expanded=expanded)
    return footprint(subject.config, weights, dtype=dtype)


def _problems(folder: Path) -> Iterator[str]:
    yield from broken_files(folder)
    if not stored_tensors(folder):
        yield "no weights (*.safetensors)"
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        yield "no tokenizer (tokenizer.json)"
