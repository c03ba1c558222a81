"""Selects the kernels of a loaded model once, by device and precision."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..isolation import Isolation
from ..records import Function, LoadedModel, Replacement
from ..registry import PluginRegistry
from ..upstream.patching import namespaces, patch, unpatch

log = logging.getLogger(__name__)


def device_kind() -> str:
    """`cpu`, `metal` or `cuda`."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def equip(loaded: LoadedModel, registry: PluginRegistry) -> str | None:
    """Install the best kernels (engine thread). Returns their name.

    `None`: none fit or pay. Kernels that fail here are logged and removed completely."""
    model: Any = getattr(loaded, "model", None)
    if not isinstance(model, nn.Module):
        return None
    chosen = registry.kernels_for(device_kind(), loaded.info.precision)
    if chosen is None or not chosen[1]:
        return None
    name, replacements = chosen
    with Isolation() as trying:
        if not install(name, replacements, model):
            return None
        log.info("it computes with kernels %s", name)
        return name
    remove(name, replacements, model)
    if trying.fault is not None:
        told, trace = trying.fault.summary, trying.fault.trace
        log.warning("kernels %s are left out: %s\n%s", name, told, trace)
    return None


def install(name: str, replacements: Iterable[Replacement], model: nn.Module) -> bool:
    """Replace functions in the modules from which `model`'s layers call them. Idempotent. Returns
    whether there is any."""
    found = []
    for each in replacements:
        owners, attribute = _owners(each, model)
        make = functools.partial(_made, each)
        found.append(patch(owners, attribute, make, key=(name, each.name)))
    return any(found)


def remove(name: str, replacements: Iterable[Replacement], model: nn.Module) -> None:
    """Undo `install`, for every model that shares modules with this one."""
    for each in replacements:
        unpatch(_owners(each, model)[0], (name, each.name))


def _made(each: Replacement, original: Function) -> Function | None:
    """`None` for a different function of that name, or if the original is better."""
    defined = getattr(original, "__module__", ""), getattr(original, "__name__", "")
    if defined != (each.module, each.name.rpartition(".")[2]):
        return None
    made = each.make(original)
    return None if made is original else functools.wraps(original)(made)


def _owners(each: Replacement, model: nn.Module) -> tuple[list[Any], str]:
    """The modules or the class in which the function is replaced, and its name there."""
    kind, _, name = each.name.rpartition(".")
    if not each.at_home:
        return list(namespaces(model)), name
    home: Any = sys.modules.get(each.module)
    owner = getattr(home, kind, None) if kind else home
    return [] if owner is None else [owner], name
