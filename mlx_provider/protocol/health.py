"""The state of an engine: models, plugins, processes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from .wire_model import PROTOCOL_VERSION, Wire

JOINED = " + "
"""Between the names of drafters."""
NEWER = frozenset({"processes", "process_fault"})
"""Fields of `Health` that are left out where they say nothing."""


class FixedPasses(Wire):
    """Passes of a reproducible model, whoever is there."""

    rows: int
    """Of each one that decodes, fillers included."""
    tokens: int
    """Of each one of a prompt but the last."""
    cost: float
    """Times that a row alone waits as long for its next token as it would without."""


class ModelStatus(Wire):
    """One loaded model, as `/v1/models` and `mlx-provider` show it."""

    model: str
    family: str
    plugin: str
    model_type: str
    context_length: int
    kv_layout: str
    mixed_prefill: bool = False
    """Chunks of prompts share the passes of rows that decode."""
    noise_floor: float = 0.0
    """Largest difference of a likely token's log-probability that was measured at load between a
    row in company and alone."""
    drafter: str = ""
    """The drafters that propose tokens, see `JOINED`; empty: none."""
    reproducible: FixedPasses | None = None
    """The operator has asked for it."""
    vision: bool
    pooling: str | None = None
    """Which states of a text make its vector; `None`: it does not embed."""
    weights_bytes: int
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    notes: list[str] = Field(default_factory=list)


class PluginStatus(Wire):
    """One installed plugin of the engine's process."""

    name: str
    distribution: str
    version: str
    in_use: bool
    conformance: str = ""
    """What `pytest --mlx-conformance` has found of it, and whether that still holds; empty: nobody
    has run that."""


class ProcessStatus(Wire):
    """One process of the group that serves one model over several machines."""

    name: str
    """Its name in the group."""
    host: str
    pid: int
    device: str
    state: Literal["serving", "lost"]
    since: float
    """Unix seconds."""
    detail: str = ""
    """Why it is lost."""


class Health(Wire):
    """What `/health` answers: `ok` is false while no engine thread lives."""

    ok: bool
    version: str
    protocol: int = PROTOCOL_VERSION
    pid: int
    device: str
    blas: str
    models: list[ModelStatus] = Field(default_factory=list)
    plugins: list[PluginStatus] = Field(default_factory=list)
    queued: int = 0
    running: int = 0
    active_memory: int = 0
    detail: str = ""
    identity: dict[str, str] = Field(default_factory=dict)
    """Version, Python and settings of the engine process; told to its owner alone."""
    out_of_date: list[str] = Field(default_factory=list)
    """What has changed on disk since it was started, and last what becomes of it."""
    processes: list[ProcessStatus] = Field(default_factory=list)
    """Of a model over several machines, the leader first."""
    process_fault: ProcessStatus | None = None
    """For which the group was last started again."""

    def without_load(self) -> Health:
        """The same without what tells how much others ask for."""
        return self.model_copy(update={"queued": 0, "running": 0, "active_memory": 0})

    @model_serializer(mode="wrap")
    def _for_any_client(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """An older client of the same protocol knows no groups, and meets none if there is none."""
        values: dict[str, Any] = whole(self)
        return {name: values[name] for name in values if values[name] or name not in NEWER}
