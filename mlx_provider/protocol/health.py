"""The state of an engine: models, plugins, processes."""

from __future__ import annotations

from pydantic import Field

from .wire_model import PROTOCOL_VERSION, Wire

JOINED = " + "
"""Between the names of drafters."""


class FixedPasses(Wire):
    """The fixed sizes of the passes of a reproducible model."""

    rows: int
    """Rows of each decode pass, including fillers."""
    tokens: int
    """Tokens of each prefill pass except the last one of a prompt."""
    cost: float
    """Duration of a single row's decode pass, relative to one without this option."""


class ModelStatus(Wire):
    """The state of one loaded model, as `/v1/models` and `mlx-provider` show it."""

    model: str
    family: str
    plugin: str
    model_type: str
    context_length: int
    kv_layout: str
    mixed_prefill: bool = False
    """Whether prompt chunks share the passes of decoding rows."""
    noise_floor: float = 0.0
    """Largest difference of a likely token's log-probability, measured at load, between a
    row in a batch and the same row alone."""
    drafter: str = ""
    """The drafters that propose tokens, see `JOINED`; empty: none."""
    reproducible: FixedPasses | None = None
    """Set if the operator has chosen `reproducible`."""
    vision: bool
    pooling: str | None = None
    """How the states of a text are pooled to its vector; `None`: it does not embed."""
    weights_bytes: int
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    notes: list[str] = Field(default_factory=list)


class PluginStatus(Wire):
    """One plugin that the engine process has found."""

    name: str
    distribution: str
    version: str
    in_use: bool
    conformance: str = ""
    """The result of `pytest --mlx-conformance`, and whether it is still valid; empty: it was not
    run."""


class Health(Wire):
    """The reply of `/health`. `ok` is false while no engine thread runs."""

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
    """Version, Python and settings of the engine process. Only for its owner."""
    out_of_date: list[str] = Field(default_factory=list)
    """Changes on disk since the start of the engine. Last entry: the consequence."""

    def without_load(self) -> Health:
        """The same without the load of other clients."""
        return self.model_copy(update={"queued": 0, "running": 0, "active_memory": 0})
