"""Models for this machine, and how much of their context fits into memory. Light to import."""

from __future__ import annotations

import os
import platform
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import installed_version
from ..errors import BadRequest, MLXProviderError
from ..families.checkpoint import named_context, text_fields
from ..logs import format_size
from ..records import Client
from ..registry import PluginRegistry
from ..serving.hub import DEMOS, Outline, cached_models, checkpoint, full_name, local_folder
from ..settings import engine_settings
from ..upstream.runtime import CHIP, output_of, require_mlx
from .config import Served

if TYPE_CHECKING:
    from ..serving.estimate import Footprint

MOST_BYTES_PER_TOKEN = 3_000_000_000  # of weights; with more, a machine without a GPU is slow


@dataclass(frozen=True)
class Recommended:
    name: str  # a Hub id
    weights: int  # bytes
    read: int  # bytes of weights that are read for one token
    memory: int  # GB of a machine on which it leaves enough for a context
    why: str


@dataclass(frozen=True)
class Machine:
    chip: str
    memory: int  # bytes, shared by CPU and GPU or of the GPU alone
    gpu: bool = True


def recommended_models() -> tuple[date, list[Recommended]]:
    """The list that this package ships, best first, and its date."""
    path = Path(__file__).with_name("recommended.toml")
    read = tomllib.loads(path.read_text(encoding="utf-8"))
    return read["date"], [Recommended(**fields) for fields in read["model"]]


def recommend_two(machine: Machine, models: Sequence[Recommended]) -> list[Recommended]:
    """The best of the models that fits, and a small one, if there are such; without a GPU, both
    read few weights per token. `models`: best first."""
    fitting = [model for model in models if model.memory * 1e9 <= machine.memory]
    first = [model for model in fitting if machine.gpu or model.read <= MOST_BYTES_PER_TOKEN][:1]
    small = [model for model in fitting if model.weights <= MOST_BYTES_PER_TOKEN]
    return [*first, *(model for model in small if model not in first)][:2]


def this_machine(
    run: Callable[[Sequence[str]], str] = output_of, system: str = platform.system()
) -> Machine:
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if system == "Darwin":
        return Machine(run(CHIP).strip() or "a Mac", host)
    if installed_version("mlx-cuda-13"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        name, _, memory = run(query).partition("\n")[0].rpartition(",")
        if memory.strip().isdecimal():
            return Machine(name, int(memory) * 2**20)
    source = Path("/proc/cpuinfo")
    lines = source.read_text(encoding="utf-8").splitlines() if source.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return Machine(next(names, "a CPU"), host, gpu=False)


LEAST_CONTEXT_TOKENS = 16_384  # for agents, whose first requests alone have 7,000 to 21,000
MOST_CONTEXT_TOKENS = 131_072  # by default: longer prompts take too long
DEMO_OUTPUT = 256  # tokens of a reply
BYTES_PER_TOKEN = 4.5  # in an agent's first request, with a vocabulary for English and code
DEMO_BYTES_PER_TOKEN = 1.8
MEMORY_SHARE = 0.9  # of the memory limit, for weights and requests; the rest is for passes
ANSWER_SHARE = 4  # a reply gets one of so many parts of the context
MOST_OUTPUT_TOKENS = 32_000


@dataclass(frozen=True)
class Candidate:
    served: Served  # context 0: the weights alone do not fit
    weights: int  # bytes
    here: bool  # whether the weights are on this machine
    family: str

    @property
    def fits(self) -> bool:
        """Whether enough context is left for agents, or the model's own, if that is shorter."""
        least = min(LEAST_CONTEXT_TOKENS, self.served.own_context or LEAST_CONTEXT_TOKENS)
        return self.served.context >= least

    @property
    def summary(self) -> str:
        where = "" if self.here else ", to be downloaded"
        weights = f"{format_size(self.weights)}{where}"
        return f"{self.served.model}: {weights}, context {self.served.context:,}"


def alias(model: str) -> str:
    """A model's short name for clients, without owner, folder and revision."""
    return Path(model.partition("@")[0]).expanduser().name or model


def device_memory(environ: Mapping[str, str] = os.environ) -> int:
    """Bytes that the engine may use; if it runs, what it found before it loaded models."""
    from ..client.connection import local_client
    from ..serving.memory_limit import memory_limit

    require_mlx()
    chosen = engine_settings(environ).memory_limit
    if chosen is None:
        with suppress(MLXProviderError), closing(local_client(environ)) as client:
            chosen = client.stats().memory.limit or None
    return memory_limit(chosen)


def request_memory(limit: int) -> int:
    return int(MEMORY_SHARE * limit)


def candidate(
    model: str, registry: PluginRegistry, memory: int, wanted: int | None = None
) -> Candidate:
    """The model, with the context that fits into `memory` bytes, at most `wanted`. Reads only small
    files, here or on the Hub. Raises `ModelNotFound`, `UnsupportedModel`, `BadRequest`."""
    from ..serving.estimate import context_that_fits

    model = full_name(model)
    found = checkpoint(model)
    family, _ = registry.family_for(found.config)
    own = named_context(text_fields(found.config))
    limit = wanted or min(own or MOST_CONTEXT_TOKENS, MOST_CONTEXT_TOKENS)
    context = context_that_fits(footprint_of(found), request_memory(memory), limit)
    output = max(1, min(MOST_OUTPUT_TOKENS, context // ANSWER_SHARE))
    served = Served(
        name=alias(model),
        model=model,
        context=context,
        output=DEMO_OUTPUT if model in DEMOS else output,
        images="vision_config" in found.config,
        thinks=registry.detect_reasoning_parser(found.chat_template) is not None,
        own_context=own,
    )
    return Candidate(served, found.weight_bytes, found.here, family.name)


def footprint_of(found: Outline) -> Footprint:
    """The weights alone if the config does not describe the rest."""
    from ..serving.estimate import Footprint, footprint

    try:
        return footprint(found.config, found.weight_bytes)
    except BadRequest:
        return Footprint(found.weight_bytes, 0, 0)


def require_fit(
    found: Candidate,
    memory: int,
    wanted: int | None = None,
    client: Client | None = None,
    larger: Sequence[str] = (),
) -> None:
    """Raise `BadRequest` if the context is too small for the client's first prompt, for what a user
    requests (`wanted`) or, without that, for agents. `larger`: models that the error suggests."""
    model, context = found.served.model, found.served.context
    each = DEMO_BYTES_PER_TOKEN if model in DEMOS else BYTES_PER_TOKEN
    tokens = int(client.prompt_bytes / each) if client else 0
    if client and context <= tokens:
        remedy = "choose a smaller model, a client that sends less, or a larger --context"
        if larger:
            remedy = f"choose a larger model, such as {' or '.join(larger)}"
        raise BadRequest(
            f"a context of {context:,} tokens is too small for {client.title or client.name}"
            f", whose first request has about {tokens:,}: {remedy}",
            param="context",
        )
    sizes = (
        f"{format_size(found.weights)} of weights leave room for a context of {context:,} "
        f"tokens in the {format_size(memory)} that the engine may use"
    )
    if wanted is not None and context < wanted:
        raise BadRequest(f"{model}: {sizes}, not of {wanted:,}", param="context")
    if wanted is None and not found.fits:
        raise BadRequest(
            f"{model} does not fit: {sizes}; coding agents need {LEAST_CONTEXT_TOKENS:,}. "
            "Choose a smaller model",
            param="model",
        )


def candidates_here(registry: PluginRegistry, memory: int) -> list[Candidate]:
    """Complete models in the Hub cache that a family serves and that fit, best first."""
    found: list[Candidate] = []
    for name in cached_models():
        # else it is not a language model, or of an architecture without a family
        with suppress(MLXProviderError):
            if local_folder(name, repository=True) is not None:
                found.append(candidate(name, registry, memory))
    return sorted((model for model in found if model.fits), key=lambda model: -model.weights)


def recommend(registry: PluginRegistry, memory: int) -> list[str]:
    """Hub ids of models whose weights leave a tenth of `request_memory` or more, largest first."""
    named = {model.name: model.weights for model in recommended_models()[1]}
    for family in registry.model_families.values():
        named |= family.recommended
    fitting = [name for name, weights in named.items() if weights <= MEMORY_SHARE**2 * memory]
    return sorted(fitting, key=lambda name: -named[name])


def choose(
    model: str | None,
    registry: PluginRegistry,
    memory: int,
    wanted: int | None = None,
    client: Client | None = None,
) -> Candidate:
    """The `model`; without one, the best on this machine, else the shipped one. `wanted`: a context
    that the user requests. Raises like `candidate` and `require_fit`."""
    if model is None:
        here = candidates_here(registry, memory)
        model = here[0].served.model if here else "demo"
    found = candidate(model, registry, memory, wanted)
    larger = recommend(registry, memory)[:3] if found.served.model in DEMOS else ()
    require_fit(found, memory, wanted, client, larger)
    return found
