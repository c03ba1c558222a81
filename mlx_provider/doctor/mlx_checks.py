"""Checks that need MLX and the other imports of an engine."""

from __future__ import annotations

from . import (
    checkpoint,
    clients,
    engine,
    machine,
    measured,
    one_token,
    plugins,
    speculation,
    template,
)
from .base_checks import ASIDE, REINSTALL
from .checks import Check

SETTING = "correct the variable that is named, or unset it"
READABLE = "make the file or folder that is named readable for this user"
MODEL = "download or convert the model again, or name another"
FOUND = "model.found"

CHECKS = (
    Check("settings", machine.settings, SETTING),
    Check("memory.limit", machine.memory, SETTING),
    Check("memory.wired", machine.wired, ASIDE),
    Check("runtime.folder", machine.runtime_folder, SETTING),
    Check("disk.prefix_cache", machine.disk_tier, READABLE),
    Check("settings.models_file", machine.owners_file, SETTING),
    Check("plugins", plugins.installed, REINSTALL),
    Check("engine", engine.running, f"correct what is named, or {engine.RESTART}"),
    Check("clients", clients.configured, READABLE),
    Check("clients.keys", clients.keys, ASIDE),
    Check("clients.web_proxy", clients.web_proxies, ASIDE),
    Check(FOUND, checkpoint.found, "correct the name; `demo` always works", of_model=True),
    Check("model.files", checkpoint.files, MODEL, of_model=True),
    Check(
        "model.family",
        plugins.family,
        "install a plugin that brings a family for it (hook mlx_model_families), or take another",
        of_model=True,
    ),
    Check("disk.download", machine.download, ASIDE, of_model=True),
    Check("model.memory", checkpoint.memory, MODEL, of_model=True),
    Check("model.formats", plugins.parsers, MODEL, of_model=True),
    Check("template.plain", template.plain, template.OTHER, of_model=True),
    Check("template.system", template.system, template.OTHER, of_model=True),
    Check("template.tools", template.tools, template.OTHER, of_model=True),
    Check("template.history", template.history, template.OTHER, of_model=True),
    Check("template.thinking", template.thinking, template.OTHER, of_model=True),
    Check("template.images", template.images, template.OTHER, of_model=True),
    Check("proxy.token", one_token.token, one_token.LOGS, of_model=True, thorough=True),
    Check("measured.decoding", measured.decoding, SETTING, of_model=True),
    Check("speculation.head", speculation.head, MODEL, of_model=True),
    Check("speculation.gain", speculation.gain, SETTING, of_model=True),
)
