"""Errors of models that could not be loaded or started."""

from __future__ import annotations

import logging

from ..errors import (
    BadRequest,
    LoadFailed,
    MLXProviderError,
    PluginError,
    for_another,
    wrong_option,
)
from ..isolation import LOG, Fault
from ..registry import Plugin

log = logging.getLogger(__name__)


def stranger_of(plugin: Plugin) -> str:
    """Name and version. Empty for a built-in one."""
    return "" if plugin.ours else str(plugin)


def load_error(
    fault: Fault | None, name: str, family: str, *, trusted: bool, stranger: str
) -> MLXProviderError:
    """Names the option that caused the fault, if any. `stranger`: the third party's plugin that
    serves the model."""
    if fault is None:
        return LoadFailed(f"{name} could not be loaded by family {family!r}")
    error = fault.error
    known = error if isinstance(error, MLXProviderError) else None
    if known is None:
        log.error("loading %s\n%s", name, fault.trace)
    named = known is not None and (known.param or "").startswith("model_info.")
    if "trust_remote_code" in str(error) and not (trusted or named):
        return wrong_option("trust_remote_code", f"{name} brings code of its own: {error}")
    if known is not None:
        return for_another(known)
    found = fault.origin  # the fault may be in a drafter or kernels of another plugin
    where = "" if found is None else f", {found.called} failed"
    message = f"{name} could not be loaded by family {family!r}{where}: {fault.summary}"
    at_fault = stranger if found is None or found.ours else f"{found.plugin} ({found.distribution})"
    if at_fault and fault.lasting:
        return PluginError(f"plugin {at_fault}: {message}; {LOG}")
    if isinstance(error, RecursionError):  # from a library that reads a deep tokenizer.json
        return BadRequest(message, param="model")
    return LoadFailed(message)
