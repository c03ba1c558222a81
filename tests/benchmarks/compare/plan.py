"""The measurements, their sizes, and the command that repeats them."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_provider.errors import BadRequest
from peers import MLX_LM, MLX_VLM
from random_weights import IMAGE_EDGE
from servers import Kind

from .formats import FORMATS, refuse_unknown, write_format
from .others import OURS, Other

PARTS = ("answers", "speed", "reuse", "stall")
FAMILIES = ("llama", "qwen3_5")
"""Attention only, and a hybrid of attention and recurrent layers."""
KINDS = {"mlx-lm": MLX_LM, "mlx-vlm": MLX_VLM}
OWN = "as it is"
"""The format of a given model."""


@dataclass(frozen=True)
class Plan:
    """The same plan asks the same questions."""

    parts: Sequence[str] = PARTS
    models: Sequence[str] = ()
    """Folders or Hub repositories; none: random weights."""
    families: Sequence[str] = FAMILIES
    formats: Sequence[str] = FORMATS
    hidden: int = 256
    layers: int = 6
    peers: Sequence[str] = tuple(KINDS)
    """Names in `KINDS` of servers to start."""
    others: Sequence[Other] = ()
    native: bool = True
    """Measure our engine also in the checkpoint's dtype, if that is not float32."""
    streams: Sequence[int] = (1, 2, 4, 8, 16, 32)
    crowd: int = 16
    """Requests at once whose answers are compared with those of each alone."""
    words: int = 40
    """Words of the shortest question; others have up to twice as many."""
    reply: int = 64
    """Tokens of each answer at most."""
    prompt: int = 1000
    """Words of a long prompt."""
    edge: int = IMAGE_EDGE
    """Pixels along an image's sides."""
    rounds: int = 3
    limit: float = 120.0
    """Seconds for one request."""

    @property
    def kinds(self) -> list[Kind]:
        return [KINDS[name] for name in self.peers]

    def check(self) -> None:
        """Raise `BadRequest` that names the option."""
        for family in () if self.models else self.families:
            for form in self.formats:
                refuse_unknown(family, form)
        names = [OURS, *(kind.name for kind in self.kinds), *(o.name for o in self.others)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise BadRequest(f"two servers called {', '.join(twice)}", param="server")
        if self.others and len(self.models) != 1:
            raise BadRequest(
                "--server needs one --model: the one that the server has, too",
                param="server",
            )

    def command(self, out: str = "") -> str:
        """The command line that repeats this, with all defaults."""
        words = ["python", "tests/benchmarks", "compare", *self._subject_options()]
        words += [*_repeated("--part", self.parts), *_repeated("--streams", self.streams)]
        words += _repeated("--peer", self.peers or ["none"])
        words += _repeated("--server", [each.option for each in self.others])
        for name in ("crowd", "words", "reply", "prompt", "edge", "rounds"):
            words += [f"--{name}", str(getattr(self, name))]
        words += ["--limit", f"{self.limit:g}", *([] if self.native else ["--no-native"])]
        return shlex.join([*words, *(["--out", out] if out else [])])

    def _subject_options(self) -> list[str]:
        if self.models:
            return _repeated("--model", self.models)
        words = [*_repeated("--family", self.families), *_repeated("--format", self.formats)]
        return [*words, "--hidden", str(self.hidden), "--layers", str(self.layers)]


def _repeated(option: str, values: Sequence[object]) -> list[str]:
    return [word for value in values for word in (option, str(value))]


@dataclass(frozen=True)
class Subject:
    """One model that every side serves."""

    model: str
    """Family of random weights, or what the user called it."""
    format: str
    folder: Path
    sees: bool
    """Takes images."""


def refuse_too_large(plan: Plan, subject: Subject, memory: int) -> None:
    """Raises `BadRequest` if the sides' copies of the weights do not fit into memory."""
    weights = sum(path.stat().st_size for path in subject.folder.glob("*.safetensors"))
    copies = 1 + len(plan.peers)
    if copies * weights > memory:
        raise BadRequest(
            f"{copies} servers with {weights / 1e9:.0f} GB of weights each do not fit into "
            f"{memory / 1e9:.0f} GB of memory: leave some out with --peer, or take a smaller model",
            param="peer",
        )


def subjects(plan: Plan, scratch: Path) -> Iterator[Subject]:
    """One after another; a folder of random weights is written when its turn comes.

    Raises `ModelNotFound` or `BadRequest` for an invalid model.
    """
    from mlx_provider.commands import folder_of

    for model in plan.models:
        folder = folder_of(model)
        yield Subject(folder.name if Path(model).is_dir() else model, OWN, folder, sees(folder))
    if plan.models:
        return
    for family in plan.families:
        for form in plan.formats:
            folder = scratch / f"{family}-{form}"
            write_format(folder, family, form, plan.hidden, plan.layers)
            yield Subject(family, form, folder, sees(folder))


def sees(folder: Path) -> bool:
    from mlx_provider.families.checkpoint import read_json

    return "vision_config" in read_json(folder / "config.json")
