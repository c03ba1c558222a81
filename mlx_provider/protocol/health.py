"""The state of an engine: models, plugins, processes."""

from __future__ import annotations

from pydantic import Field

from .wire_model import PROTOCOL_VERSION, Wire

JOINED = " + "


class FixedPasses(Wire):
    rows: int
    """Rows of each decode pass, including fillers."""
    tokens: int
    """Tokens of each prefill pass except the last of a prompt."""
    cost: float
    """Time of a single row's decode pass, relative to one without this option."""


class ModelStatus(Wire):
    model: str
    family: str
    plugin: str
    model_type: str
    context_length: int
    kv_layout: str
    mixed_prefill: bool = False
    """Prompt chunks share the passes of decoding rows."""
    noise_floor: float = 0.0
    """Largest difference of a likely token's log-probability between a row in a batch and alone,
    measured at load."""
    drafter: str = ""
    """Names joined by `JOINED`; empty: none."""
    reproducible: FixedPasses | None = None
    vision: bool
    pooling: str | None = None
    """How a text's states become its vector; `None`: it does not embed."""
    weights_bytes: int
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    notes: list[str] = Field(default_factory=list)


class PluginStatus(Wire):
    name: str
    distribution: str
    version: str
    in_use: bool
    conformance: str = ""
    """Result of `pytest --mlx-conformance`, and whether it is still valid; empty: not run."""


class Health(Wire):
    """`ok` is false while no engine thread runs."""

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
    """Version, Python and settings of the process. Only for its owner."""
    out_of_date: list[str] = Field(default_factory=list)
    """Changes on disk since the start. Last entry: the consequence."""

    def without_load(self) -> Health:
        """Hides the load of other clients."""
        return self.model_copy(update={"queued": 0, "running": 0, "active_memory": 0})
