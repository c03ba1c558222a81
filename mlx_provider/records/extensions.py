"""Drafters, kernels and clients.

`Run`, `Parts` and `Part` are for kernels of attention: if rows of several caches decode in a call,
the keys and values of `scaled_dot_product_attention` are `Parts`, with one array for each cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np
    from numpy.typing import NDArray

    from .model import LoadedModel

Function = Callable[..., Any]
MOST_DRAFTS = 7
"""Most drafts of a row in one pass: fused attention takes 8 queries (Metal, mlx 0.32.4)."""


class DeviceTokens(Sequence[int]):
    """Drafts on the device, which the engine gives to the model before the host has read them."""

    def __init__(self, array: mx.array) -> None:
        """`array`: (n,) of integers, which need not be computed yet."""
        self.array = array.reshape(-1)
        self._read: Any = None

    def __len__(self) -> int:
        return self.array.size

    def __getitem__(self, at: Any) -> Any:
        if self._read is None:
            self._read = self.array.tolist()
        return self._read[at]

    def first(self, count: int) -> DeviceTokens:
        """The first `count` tokens, or all if there are fewer."""
        return self if len(self) <= count else DeviceTokens(self.array[:count])


@dataclass(eq=False)
class DraftRow:
    """A row for which drafts are wanted."""

    tokens: list[int]
    """Prompt and reply so far; the list grows. The model has not seen the last token yet."""
    wanted: int = 0
    """Maximum number of drafts, 1 to `MOST_DRAFTS`."""
    fresh: int = 0
    """Number of last tokens with new `hidden` states; in the first call, some of the prompt."""
    hidden: mx.array | None = None
    """(fresh, hidden size), if the drafter needs them: the states from which the model drew the
    last `fresh` tokens. After a step without drafts for any row, tokens of that step have none."""
    state: Any = None
    """Kept for the drafter from one call to the next."""
    salt: str = ""
    """The tenant of the text. Use what is remembered of a row only for rows of the same salt:
    drafts, and their speed, would tell another tenant about the text."""


class Drafting(Protocol):
    """A drafter at work for one loaded model. Every call is on the engine thread."""

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int] | None]:
        """Tokens that may follow each row's last one, in the order of `rows`; at most `wanted`.

        An empty list: ask again after a growing number of steps; `None`: at the next step.
        `DeviceTokens` need not be computed yet. Compute no longer than a step takes: read a long
        prompt in pieces. A fault costs only the drafts."""


class Scoring(Protocol):
    """One prompt in a scorer. Dropping it frees its memory."""

    def advance(self) -> NDArray[np.float32] | None:
        """Run one piece, as short as a step, and wait for it. After the last one, returns a score
        for each token, (tokens,): higher ones matter more for the reply.

        Pieces must not depend on time, so that a prompt has the same scores in any batch. After a
        fault, the whole prompt is prefilled."""


@runtime_checkable
class ScoresPrompts(Protocol):
    """A `Drafting` that scores the tokens of a prompt for sparse prefill."""

    @property
    def longest_scored(self) -> int:
        """The longest prompt that is scored, in tokens."""

    @property
    def scored_token_bytes(self) -> int:
        """Bytes of memory per token until all are scored."""

    def scoring(self, tokens: Sequence[int]) -> Scoring:
        """A `Scoring` of a prompt, which has computed nothing yet."""


@dataclass(frozen=True)
class DraftOptions:
    model: Path | None = None
    """The folder of a smaller model of the same vocabulary."""
    room: int | None = None
    """Bytes of memory for the drafter; `None`: no limit."""
    extra: Mapping[str, Any] = field(default_factory=dict)  # the operator's `extra`, unchanged
    scores: bool = False
    """Sparse prefill is on: a model that can only score prompts (`ScoresPrompts`) may start."""


@dataclass(frozen=True)
class Drafter:
    name: str
    refuses: Callable[[Path, LoadedModel, DraftOptions], str]
    """(folder of the checkpoint, loaded model, options) -> why it cannot draft for the model, on
    one line for the operator; empty: it can. Reads no weights."""
    start: Callable[[Path, LoadedModel, DraftOptions], Drafting]
    """Same arguments. Load the drafter (engine thread). Raises errors of `mlx_provider.errors`."""
    keeps: Callable[[Drafting], int] = field(default=lambda drafting: 0)
    """Maximum bytes that it keeps for rows, in addition to what `start` has loaded."""
    hidden: bool = False
    """It needs hidden states: the model must be a `HiddenStatesModel`."""
    media: bool = True
    """It can draft for prompts with images."""
    reads_draft_model: bool = False
    """It drafts with the folder of `DraftOptions.model`."""
    automatic: int = 0
    """Rank of the drafter if the operator names none; 0: never taken."""
    serves: str = ""
    """One line for people."""


@dataclass(frozen=True)
class UpstreamPatch:
    """A function or method of upstream that a plugin replaces."""

    target: str
    """Its full name: `mlx_lm.models.base.scaled_dot_product_attention`."""
    version: str
    """The distribution and version of the source that was read: `mlx-lm 0.32.2`."""
    reason: str
    """One line for people: what upstream and the replacement do."""


@dataclass(frozen=True)
class Replacement:
    module: str
    """The module that defines the function; functions of the same name from other modules stay."""
    name: str
    """A function of that module, or `Class.method` of it with `in_module`."""
    make: Callable[[Function], Function]
    """(original) -> a function with the same arguments and result, up to rounding. It calls the
    original for other dtypes, quantised keys, small arrays. The keys of an attention may be
    `Parts`. If it returns the original, nothing is replaced."""
    in_module: bool = False
    """Its callers are in the module that defines it, not in those of a model's layers."""
    tolerance: float = 1e-4
    """Largest difference from the original in float32, as a share of the largest value; tests
    of the plugin check it."""


@dataclass(frozen=True)
class Kernels:
    """Replacements for one kind of device. A loaded model gets one of the `Kernels` that match."""

    name: str
    matches: Callable[[str, str], bool]
    """(`cpu`, `metal` or `cuda`, `ModelInfo.precision`) -> whether they are made for it."""
    replacements: Callable[[], Iterable[Replacement]]
    """Called only if these are chosen: import here what they need, not with the plugin."""
    rank: int = 0
    """The highest rank of those that match is chosen."""
    serves: str = ""
    """One line for people."""
    patches: tuple[UpstreamPatch, ...] = ()
    """One for each replacement, with the reason."""


@dataclass(frozen=True)
class Run:
    """Consecutive rows of a call that share one cache."""

    cache: Any
    rows: slice
    turned: bool = False
    """The rows are L tokens of one sequence: queries (L, H, 1, D) stand for (1, H, L, D)."""


class Parts(list[Any]):
    """Keys, or values, of several caches, in the order of their rows: one array for each run."""

    def __init__(self, arrays: list[Any], runs: list[Run], *, isolated: bool = False) -> None:
        """`isolated`: the other parts must not change how one part is computed."""
        super().__init__(arrays)
        self.runs = runs
        self.isolated = isolated


class Part(NamedTuple):
    """What one run attends to."""

    keys: Any
    """(B, Hk, S, D)"""
    values: Any
    """(B, Hk, S, Dv)"""
    mask: Any
    """`None`, `"causal"`, or an array for (B, H, L, S): bool (may see) or float (added)."""
    rows: slice = slice(None)
    turned: bool = False

    def select(self, x: Any) -> Any:
        """The run's part of queries for all rows, as (B, H, L, D)."""
        return x[self.rows].swapaxes(0, 2) if self.turned else x[self.rows]


def parts_of(keys: Any, values: Any, mask: Any) -> list[Part]:
    """The parts of a call. `mask`: one for each part, or one for all. Plain arrays are one part."""
    if not isinstance(keys, Parts):
        return [Part(keys, values, mask)]
    masks = mask if isinstance(mask, list) else [mask] * len(keys)
    return [
        Part(k, v, part_mask, run.rows, run.turned)
        for k, v, part_mask, run in zip(keys, values, masks, keys.runs, strict=True)
    ]


@dataclass(frozen=True)
class Gateway:
    """The gateway that a client uses, and its model."""

    url: str
    """Without a path: `http://127.0.0.1:4000`."""
    key: str = field(repr=False)
    """Put it into `Profile.environment` or `Profile.files`; an argument with it is refused."""
    model: str
    """The model's name for clients; any other name leads to the same model."""
    context: int
    """Tokens of prompt and answer."""
    output: int
    """Tokens of an answer at most."""
    images: bool
    """The model takes images."""
    folder: Path
    """Folder of the profile's files. Only the user can read it; it is deleted when the client ends.
    Its path is the same at the next launch."""
    workplace: Path
    """The client's working folder."""


@dataclass(frozen=True)
class Profile:
    """How a client is run, so that it neither reads nor writes the user's own settings."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to the user's."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Content by path below `Gateway.folder`."""
    arguments: tuple[str, ...] = ()
    """Arguments before those of the user."""
    hidden: tuple[str, ...] = ()
    """Patterns (`ANTHROPIC_*`) of the user's variables that would redirect the client."""


@dataclass(frozen=True)
class Client:
    """A program that speaks one of a gateway's APIs."""

    name: str
    """As in `mlx-provider launch <name>`."""
    command: str
    """The executable on `PATH`."""
    install: str
    profile: Callable[[Gateway], Profile]
    """Writes nothing itself."""
    api: Literal["chat", "messages", "responses"] = "chat"
    aliases: tuple[str, ...] = ()
    title: str = ""
    """Its name for people, such as `Claude Code`."""
    prompt_bytes: int = 0
    """Size of its first request without files of a project; 0: not known."""
    subagent: Callable[[Gateway], Profile] | None = None
    """The profile that keeps the user's own settings and main model, and adds an agent with the
    gateway's model. Writes nothing itself. `None`: the client cannot have one."""
    forwards: str = ""
    """The main model, as in an entry of LiteLLM (`anthropic/claude-*`), if a `subagent` profile
    sends its requests to the gateway, too. The gateway passes them on with the client's own login,
    or the key in the user's environment."""
