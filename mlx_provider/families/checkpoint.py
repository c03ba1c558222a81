"""What the JSON files of a model's folder say, and whether upstream has a class for it."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json

from ..errors import BadRequest
from ..records import LoadOptions, SamplingDefaults
from ..safe_open import read_bounded

T = TypeVar("T")
LARGEST_FILE = 2**25  # bytes
DEFAULT_CONTEXT = 131072
"""For a config without a context length."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Empty: there is no file. Raises `BadRequest` for other content."""
    content: Any = _read(path, from_json, {})
    if not isinstance(content, dict):
        raise BadRequest(f"{path} does not hold a JSON object", param="model")
    return content


def read_modules(folder: Path) -> list[Mapping[str, Any]]:
    """The modules of sentence-transformers in a folder, the model first. Raises `BadRequest`."""
    content: Any = _read(folder / "modules.json", from_json, [])
    listed = content if isinstance(content, list) else []
    return [module for module in listed if isinstance(module, Mapping)]


def _read(path: Path, parse: Callable[[bytes], T], otherwise: T) -> T:
    try:
        return parse(read_bounded(path, LARGEST_FILE))
    except FileNotFoundError:
        return otherwise
    except (OSError, ValueError) as error:
        raise BadRequest(f"{path} cannot be read: {error}", param="model") from error


def text_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config for the language model, with the outer fields."""
    for name in ("text_config", "llm_config", "language_config"):
        inner = config.get(name)
        if isinstance(inner, Mapping):
            return {**config, **inner}
    return config


def context_length(text: Mapping[str, Any], options: LoadOptions) -> int:
    """Most tokens of prompt and reply: the operator's choice, else the config's."""
    return options.context_length or named_context(text) or DEFAULT_CONTEXT


def named_context(text: Mapping[str, Any]) -> int | None:
    """The context length in tokens that a config gives. `None`: none, or no positive number."""
    for key in ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length", "n_ctx"):
        named = text.get(key)
        if isinstance(named, int) and named > 0 and named is not True:
            return named
    return None


def named_template(folder: Path) -> str:
    """The chat template in a folder's files, empty if none. Raises `BadRequest`."""
    template = _read(folder / "chat_template.jinja", bytes.decode, None)
    if template is not None:
        return template
    for name in ("chat_template.json", "tokenizer_config.json"):
        own = read_json(folder / name).get("chat_template")
        if isinstance(own, str):
            return own
    return ""


def sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    """generation_config.json as defaults. `do_sample: false` means greedy. If only other values are
    given, the temperature is 1, as in transformers. Values beyond a request's limits are `None`."""
    top_k = _within(generation.get("top_k"), -1, 10**6)
    named = SamplingDefaults(
        temperature=_within(generation.get("temperature"), 0, 100),
        top_p=_within(generation.get("top_p"), 0, 1),
        top_k=None if top_k is None else int(top_k),
        min_p=_within(generation.get("min_p"), 0, 1),
        repetition_penalty=_within(generation.get("repetition_penalty"), 1e-6, 100),
    )
    samples = generation.get("do_sample")
    if samples is False:
        return replace(named, temperature=0.0)
    if named.temperature is None and (samples is True or named != SamplingDefaults()):
        return replace(named, temperature=1.0)
    return named


def _within(value: object, least: float, most: float) -> float | None:
    """`None`: not a valid number within the limits of a request, for example NaN."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and least <= value <= most else None  # type: ignore[operator,return-value]


def fingerprint(folder: Path, options: LoadOptions) -> str:
    """A hash that changes with names, sizes and times of the files, and with `extra`, `dtype` and
    `adapter` of the options. Raises `BadRequest` for a link that leads to no file."""
    digest = hashlib.sha256(repr((options.extra, options.dtype)).encode())
    for root in (folder, options.adapter):
        if root is None:
            continue
        for path in sorted(root.glob("*")):
            if path.suffix in (".safetensors", ".json", ".jinja"):
                if not path.exists():
                    raise BadRequest(f"{path} leads to no file", param="model")
                stat = path.stat()
                digest.update(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def known_to_mlx_lm(config: Mapping[str, Any]) -> bool:
    """Whether mlx-lm has the classes for this `config.json`. Raises `NotInstalled`."""
    from ..upstream import mlx_lm

    return mlx_lm.supports(config)


def known_to_mlx_vlm(config: Mapping[str, Any]) -> bool:
    """Whether mlx-vlm has a folder for this `config.json`. The model may still fail to load."""
    kind = str(config.get("model_type", "")).lower().replace("-", "_")
    if not kind.isidentifier() or kind.startswith("_"):
        return False
    spec = PathFinder.find_spec("mlx_vlm")
    places = (spec.submodule_search_locations or []) if spec else []
    return any((Path(place) / "models" / kind).is_dir() for place in places)
