"""Which models there are for an agent, and how much of their context fits into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import BadRequest, MLXProviderError
from ..families.estimate import Footprint, context_that_fits, footprint, text_fields
from ..records import Client
from ..registry import PluginRegistry
from ..serving.checkpoint import Checkpoint, checkpoint
from ..serving.hub import DEMOS, cached_models
from .config import Served
from .recommended import table

LEAST_CONTEXT = 16_384
"""Tokens below which agents get nowhere: their first requests alone have 7,000 to 21,000."""
MOST_CONTEXT = 131_072
"""Tokens above which nobody waits for a prompt; `--context` may ask for more."""
DEMO_OUTPUT = 256
"""Tokens after which an answer of theirs ends: to an agent they say nothing of sense."""
BYTES_PER_TOKEN = 4.5
"""Of an agent's first request, by vocabularies that make few tokens of English and code."""
DEMO_BYTES_PER_TOKEN = 1.8
MEMORY_SHARE = 0.9
"""Of the memory limit, for weights and requests; the rest is for the passes over them."""
ANSWER_SHARE = 4
"""The part of a context that one answer may take at most."""
MOST_OUTPUT = 32_000


@dataclass(frozen=True)
class Candidate:
    """A model, and what of it fits into this machine's memory."""

    model: str
    """What follows `mlx/`."""
    weights: int
    """Bytes."""
    context: int
    """Tokens of prompt and answer; 0: the weights alone do not fit."""
    own_context: int | None
    here: bool
    """Needs no download."""
    images: bool = False
    thinks: bool = False
    family: str = ""

    @property
    def fits(self) -> bool:
        return self.context >= min(LEAST_CONTEXT, self.own_context or LEAST_CONTEXT)

    @property
    def told(self) -> str:
        """One line for people."""
        where = "" if self.here else ", to be downloaded"
        return f"{self.model}: {size(self.weights)}{where}, context {self.context:,}"

    @property
    def output(self) -> int:
        return max(1, min(MOST_OUTPUT, self.context // ANSWER_SHARE))

    def served(self) -> Served:
        return Served(
            name=alias(self.model),
            model=self.model,
            context=self.context,
            output=DEMO_OUTPUT if self.model in DEMOS else self.output,
            images=self.images,
            thinks=self.thinks,
            own_context=self.own_context,
        )


def size(number: int) -> str:
    """Bytes, for people."""
    return f"{number / 1e9:.1f} GB" if number >= 10**8 else f"{number / 1e6:.1f} MB"


def alias(model: str) -> str:
    """The name that clients say: of a Hub id without its owner, of a folder its last part."""
    name = Path(model.partition("@")[0]).expanduser().name
    return name or model


def device_memory() -> int:
    """Bytes that the engine of this machine may use. Imports mlx."""
    from ..config import engine_settings
    from ..engine.memory import memory_limit
    from ..upstream.installed import require_mlx

    require_mlx()
    return memory_limit(engine_settings().memory_limit)


def candidate(
    model: str, registry: PluginRegistry, memory: int, wanted: int | None = None
) -> Candidate:
    """What is known of a model, here or on the Hub; nothing of its weights is read.

    `wanted`: a context that the user has asked for. Raises `ModelNotFound`, `UnsupportedModel`,
    `BadRequest`.
    """
    model = model.removeprefix("mlx/")
    found = checkpoint(model)
    family, _ = registry.family_for(found.config)
    need = needs(found)
    own = _own_context(found)
    return Candidate(
        model=model,
        weights=found.weight_bytes,
        context=_context(model, need, memory, own, wanted),
        own_context=own,
        here=found.here,
        images="vision_config" in found.config,
        thinks=registry.detect_reasoning_parser(found.chat_template) is not None,
        family=family.name,
    )


def needs(found: Checkpoint) -> Footprint:
    """Its memory; what a stranger's config does not tell, the engine finds out when it loads."""
    try:
        return footprint(found.config, found.weight_bytes)
    except BadRequest:
        return Footprint(found.weight_bytes, 0, 0)


def _own_context(found: Checkpoint) -> int | None:
    length = text_fields(found.config).get("max_position_embeddings")
    return length if isinstance(length, int) else None


def _context(model: str, need: Footprint, memory: int, own: int | None, wanted: int | None) -> int:
    limit = min(own or MOST_CONTEXT, MOST_CONTEXT)
    return context_that_fits(need, int(MEMORY_SHARE * memory), wanted or limit)


def require_prompt_fits(found: Candidate, client: Client) -> None:
    """Raise `BadRequest` with the figures where not even the client's first prompt fits."""
    each = DEMO_BYTES_PER_TOKEN if found.model in DEMOS else BYTES_PER_TOKEN
    tokens = int(client.prompt_bytes / each)
    if found.context <= tokens:
        raise BadRequest(
            f"a context of {found.context:,} tokens is too small for {client.serves or client.name}"
            f", whose first request has about {tokens:,}: choose a smaller model, a client that "
            "sends less, or a larger --context",
            param="context",
        )


def require_fit(found: Candidate, memory: int, wanted: int | None = None) -> None:
    """Raise `BadRequest` with the figures where agents get nowhere with this model.

    `wanted`: a context that the user has asked for, which may be small.
    """
    figures = (
        f"{size(found.weights)} of weights leave room for a context of {found.context:,} "
        f"tokens in the {size(memory)} that the engine may use"
    )
    if wanted is not None and found.context < wanted:
        raise BadRequest(f"{found.model}: {figures}, not of {wanted:,}", param="context")
    if wanted is None and not found.fits:
        raise BadRequest(
            f"{found.model} does not fit: {figures}; coding agents need {LEAST_CONTEXT:,}. "
            "Choose a smaller model",
            param="model",
        )


def chosen(
    model: str | None, registry: PluginRegistry, memory: int, wanted: int | None = None
) -> Candidate:
    """The model that the user names, else `automatic`. Raises as `candidate` and `require_fit`."""
    found = (
        automatic(registry, memory, wanted)
        if model is None
        else candidate(model, registry, memory, wanted)
    )
    require_fit(found, memory, wanted)
    return found


def candidates_here(registry: PluginRegistry, memory: int) -> list[Candidate]:
    """Those in the local Hub cache that are whole, served by a family, and fit; best first."""
    return sorted(_usable(registry, memory), key=lambda each: -each.weights)


def _usable(registry: PluginRegistry, memory: int) -> Iterator[Candidate]:
    for name in cached_models():
        try:
            found = candidate(name, registry, memory) if _is_whole(name) else None
        except MLXProviderError:
            continue  # no language model, or of an architecture that nobody serves
        if found is not None and found.fits:
            yield found


def _is_whole(name: str) -> bool:
    from ..serving.hub import local_folder

    return local_folder(name, repository=True) is not None


def recommended(registry: PluginRegistry, memory: int) -> dict[str, int]:
    """Hub ids of our table and of families, whose weights leave room: bytes; largest first.

    Their real figures come from `candidate`, which asks the Hub.
    """
    named = [(each.name, each.weights) for each in table()[1]]
    families = registry.model_families.values()
    named += [each for family in families for each in family.recommended.items()]
    fitting = [each for each in named if each[1] <= MEMORY_SHARE**2 * memory]
    return dict(sorted(fitting, key=lambda each: -each[1]))


def automatic(registry: PluginRegistry, memory: int, wanted: int | None = None) -> Candidate:
    """The best model on this machine, where nobody can be asked; else the shipped one."""
    found = candidates_here(registry, memory)
    return candidate(found[0].model if found else "demo", registry, memory, wanted)
