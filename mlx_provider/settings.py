"""Settings of an engine, from environment variables."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, SettingsConfigDict

from .config import PREFIX, home_state
from .errors import BadRequest

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(given: object) -> object:
    """The number of bytes in a text such as `"512M"`, `"12GiB"` or `"1000"`. Raises `ValueError` if
    the text has no such form. Returns values of other types as they are."""
    if not isinstance(given, str):
        return given
    body = given.strip().upper().removesuffix("IB").removesuffix("B")
    number, unit = (body[:-1], UNITS[body[-1]]) if body[-1:] in UNITS else (body, 1)
    try:
        return int(float(number) * unit)
    except (ValueError, OverflowError):
        raise ValueError("must be a number of bytes, such as 512M or 12G") from None


def _expand(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:  # `~nobody/models`
        raise ValueError(f"must be a path: {error}") from None


def _split(separator: str) -> Any:
    """Validator of a variable that has several values, with `separator` between them."""

    def split(given: Any) -> Any:
        parts = given.split(separator) if isinstance(given, str) else None
        return given if parts is None else [part.strip() for part in parts if part.strip()]

    return BeforeValidator(split)


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0, le=2**60)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Seconds = Annotated[float, Field(ge=1e-9, le=10**9)]
UserPath = Annotated[Path, AfterValidator(_expand)]


class FixedSettings(BaseSettings):
    """Settings with the same value on every machine. Only tests change them."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True)

    queue_per_row: int = 4
    """`max_queue` per row of `max_rows`."""
    model_wait: float = 60.0
    """Seconds of waiting for memory that other models use, then 503."""
    output_reserve: int = 512
    """Output tokens for which memory is reserved at admission."""
    kv_layout: str = "auto"
    """`auto`: the best by the probe; or `grouped`, `merged`, `solo`."""
    feature_bytes: int = 256 * 2**20
    """Bytes per model for cached features of images."""
    body_bytes: int = 128 * 2**20
    """Bytes of request bodies that are read and prepared in parallel. A larger body is refused."""
    media_bytes: int = 2**30
    """Bytes of images: half while they are decoded, half while they wait for prefill."""
    measurements: str = "auto"
    """File with measurements for the next load. `auto`: in the state folder; `off`; or a path."""
    log_level: str = "info"
    prefix_bytes: int | None = None
    """Bytes of the prefix cache. Unset: a share of the memory that weights leave."""

    @classmethod
    def settings_customise_sources(  # type: ignore[override]
        cls, *_: Any, init_settings: Any, **__: Any
    ) -> Any:
        return (init_settings,)  # `engine_settings` alone reads the environment


class EngineSettings(FixedSettings):
    """Each field of this class, but no inherited one, has a variable `MLX_PROVIDER_<FIELD>`."""

    memory_limit: Annotated[Bytes, Field(ge=1)] | None = None
    """Bytes for weights, rows, passes, free buffers, prefixes. Unset: `serving/memory_limit.py`."""
    max_rows: Count = 64
    """Most rows that are prefilled or decoded at once. More requests wait."""
    stall_target: Seconds = 0.1
    """Average seconds per token of a stream while a prompt is prefilled."""
    max_chunk: Count = 2048
    """Most tokens of a prefill chunk, whether rows decode or not."""
    idle_timeout: Seconds = 600.0
    """An engine that a client has started ends after so many seconds without a client."""
    disk_cache: UserPath | None = None
    """Folder of the disk tier; `engine_settings` sets the state folder if the variable is unset.
    `None`: no home folder is known, so there is no disk tier."""
    disk_cache_bytes: Bytes | None = None
    """Most bytes of the disk tier; 0: none. Unset: by the free space."""
    models_file: UserPath | None = None
    """TOML: options per model that only the engine's owner can grant (`serving.permissions`)."""
    allowed_hosts: Annotated[tuple[str, ...], NoDecode, _split(",")] = ()
    """Host names of an engine on TCP, in addition to its own."""
    model_roots: Annotated[tuple[UserPath, ...], NoDecode, _split(os.pathsep)] = ()
    """Folders of models. Clients of a wildcard entry, and clients on other machines, can name no
    model folder outside them."""

    @property
    def max_queue(self) -> int:
        """Most waiting requests. More get 429."""
        return self.queue_per_row * self.max_rows


SETTING_NAMES = tuple(n for n in EngineSettings.model_fields if n not in FixedSettings.model_fields)


def engine_settings(environ: Mapping[str, str] = os.environ) -> EngineSettings:
    """Raises `BadRequest` with the variable and its valid values. An empty variable is unset."""
    given = {PREFIX + name.upper() for name in SETTING_NAMES} & environ.keys()
    source = EnvSettingsSource(EngineSettings)
    source.env_vars = {name.lower(): environ[name] for name in given if environ[name]}
    try:
        return EngineSettings(**{"disk_cache": home_state(environ)} | source())
    except ValidationError as error:
        first = error.errors()[0]
        name = f"{PREFIX}{first['loc'][0]}".upper()
        demand = first["msg"].removeprefix("Value error, ").replace("Input should", "must")
        raise BadRequest(f"{name}={environ[name]!r} {demand}") from None
