"""Model families: everything about a model that the core must not know.

Host methods (`prepare`) run on any thread and touch no `mx` array. Device methods (`embed`,
`prefill`, `decode`, `make_cache`) run on the engine thread alone; they return arrays and leave
no state on the model object.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

from .embedding import Embedding
from .pixels import BICUBIC, Size, scaled
from .template import TemplateForm
from .upstream import UpstreamPatch

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")

Features = Any
"""What `LoadedModel.embed` returns for one media item; opaque to the core, cached by hash."""


@dataclass(frozen=True)
class LoadOptions:
    """What the operator chose for this model (`model_info` of the config entry)."""

    adapter: Path | None = None
    trust_remote_code: bool = False
    context_length: int | None = None
    modality: Literal["auto", "text"] = "auto"
    """`text`: leave the weights of other parts than the text model where they are."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    """Expand the weights to this dtype after loading (`float32`, ...), quantised ones, too."""
    group: Any = None
    """The ranks over which the model is split (`mlx.core.distributed.Group`); `None`: it is
    whole."""


@dataclass(frozen=True)
class SamplingDefaults:
    """The model's own sampling defaults (generation_config.json); `None`: it names none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a model once it is loaded."""

    model_type: str
    context_length: int
    vocab_size: int
    """Rows of the output matrix: valid token ids are `0 .. vocab_size - 1`."""
    stop_tokens: frozenset[int]
    fingerprint: str
    """Changes whenever the same tokens could give other KV (weights, adapter, quantisation)."""
    weights_bytes: int
    precision: Literal["float32", "low"]
    """`low`: 16-bit or quantised weights, where batch size may move the last bits."""
    chat_template: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    sampling: SamplingDefaults = SamplingDefaults()
    media: frozenset[str] = frozenset()
    """Kinds of media the model takes: `image`, `video`."""
    hoist_system: bool = False
    """The template refuses a system message after the first: later ones are hoisted."""
    alternate: bool = False
    """The template wants user and assistant to take turns, the user first."""
    system_role: bool = True
    """The template shows system messages; otherwise they become the user's text."""
    tool_media: bool = False
    """The template shows images inside tool results."""
    template: TemplateForm = field(default_factory=TemplateForm)
    """The form in which the chat template takes messages and tools."""
    min_pixels: int = 0
    max_pixels: int = 0
    """Pixels of one image after the family's own scaling; 0: no image input."""
    embedding: Embedding = field(default_factory=Embedding)
    notes: tuple[str, ...] = ()
    """What the operator should know of how this model is served."""


@dataclass(frozen=True)
class MediaItem:
    """One image, or the frames of one video; decoded each time that its pixels are asked for.

    Keeps what was sent, not the pixels: a family asks for the size that it needs, once.
    """

    kind: Literal["image", "video"]
    shape: tuple[int, ...]
    """(frames,) H, W, 3."""
    decode: Callable[[Size | None, int], NDArray[np.uint8]]
    """(size, resample) -> pixels; see `pixels` and `scaled`."""
    content_hash: str
    """SHA-256 of the original bytes plus whatever changes the pixels."""
    detail: Literal["auto", "low", "high"] = "auto"

    @classmethod
    def of(cls, kind: Literal["image", "video"], pixels: NDArray[np.uint8], key: str) -> MediaItem:
        """An item whose pixels are at hand. `key`: its content hash."""
        return cls(kind, pixels.shape, partial(scaled, pixels), key)

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """uint8, (frames,) H, W, 3; may be read-only. Raises `MediaError`."""
        return self.decode(None, BICUBIC)

    def scaled(self, height: int, width: int, resample: int = BICUBIC) -> NDArray[np.uint8]:
        """uint8, (frames,) height, width, 3, by a filter of Pillow's. Raises `MediaError`.

        What is at least four times as high and wide is averaged over squares on the way, and takes
        that much less memory; anything smaller has the values of Pillow's `resize`.
        """
        return self.decode((height, width), resample)


class OnDemand(Generic[T]):
    """A value that is made as it is asked for, and again once it was let go. Any thread."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[T] | None = None
        self._lock = threading.Lock()

    def __call__(self) -> T:
        """The value. Raises what making it raises."""
        with self._lock:
            if self._made is None:
                self._made = (self._make(),)
            return self._made[0]

    def drop(self) -> None:
        """Let the value go."""
        self._made = None


@dataclass(frozen=True)
class MediaSpan:
    """Tokens `start .. end` of a prompt stand for one media item."""

    start: int
    end: int
    content_hash: str
    inputs: Any
    """What `LoadedModel.embed` needs (numpy arrays)."""
    ready: OnDemand[Any] | None = None
    """What of `inputs` takes memory and time: made on a host thread, where features are not kept
    already, and dropped after the prefill."""


@dataclass(frozen=True)
class Prompt:
    """A rendered, tokenised request."""

    tokens: Sequence[int]
    text: str = ""
    """The rendered template before media expansion; explains cache misses."""
    spans: Sequence[MediaSpan] = ()
    positions: NDArray[np.int32] | None = None
    """(3, length) rotary positions where they differ from 0 .. length - 1."""
    rope_delta: int = 0
    """Position of the first generated token minus the prompt's length."""
    snapshot_points: Sequence[int] = ()
    """Ascending token counts at message ends: where state is worth keeping."""

    def followed_by(self, tokens: Sequence[int]) -> Prompt:
        """The same prompt with text tokens after it (a reply that is prefilled again)."""
        if not tokens:
            return self
        positions = self.positions
        if positions is not None:
            import numpy as np  # a sixth of a second that plugin discovery need not pay

            first = len(self.tokens) + self.rope_delta
            more = range(first, first + len(tokens))
            positions = np.concatenate([positions, np.array([more] * 3, positions.dtype)], axis=1)
        return replace(self, tokens=[*self.tokens, *tokens], positions=positions)


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens `start .. stop` of one row's prompt, to be appended to that row's cache."""

    prompt: Prompt
    start: int
    stop: int
    cache: list[Any]
    features: Mapping[str, Features] = field(default_factory=dict)
    """Features of the prompt's media by content hash."""


class Tokenizer(Protocol):
    """The one tokenizer of a model (of a processor: the nested one)."""

    @property
    def fast(self) -> Any:
        """The `tokenizers.Tokenizer` behind it, for streamed decoding."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of `text`; `special`: add BOS and the like as the model's config says."""

    def encode_plain(self, text: str, *, before: str = "", special: bool = False) -> list[int]:
        """Token ids of a client's `text` behind a text of ours.

        Control tokens are those of `before` alone; in `text` they are spelt in letters. `special`:
        add BOS and the like as the model's config says, at the beginning and the end.
        """

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `tokens`."""


class LoadedModel(Protocol):
    """One model with its weights in memory."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def model(self) -> Any:
        """The `mlx.nn.Module` that computes, in whose modules kernels may replace functions.

        Anything else: they do not.
        """

    @property
    def kv_layouts(self) -> Sequence[str]:
        """Layouts worth probing, best first, out of `grouped`, `merged`, `solo`."""

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        media: Sequence[MediaItem],
        variables: Mapping[str, Any],
    ) -> Prompt:
        """Render normalised messages with the chat template and tokenise them.

        Control tokens in the prompt are those that the template writes: a text of messages,
        tools or variables that reads like one is spelt in letters.
        Media items stand in the order of the `image` and `video` parts of the messages.
        Raises `BadRequest` where the template refuses the messages.
        """

    def embed(self, span: MediaSpan) -> Features:
        """Run the vision tower on one item (engine thread)."""

    def make_cache(self) -> list[Any]:
        """A fresh cache for one row: one entry per layer."""

    def prefill(self, chunk: PrefillChunk) -> mx.array:
        """Append a chunk to the row's cache; logits (vocab,) after its last token."""

    def decode(
        self,
        tokens: mx.array,
        cache: list[Any],
        positions: mx.array,
        logits_at: mx.array | None = None,
    ) -> mx.array:
        """One token for each of B rows.

        tokens: (B,) int32; positions: (B,) int32, the rotary position of each token; returns
        logits (B, vocab). `cache` holds the rows in the same order. In the layout `grouped` the
        last of them may be text tokens of one prompt, which only its cache and attention know;
        `logits_at`, (L,) int32, then says which are wanted: (L, vocab). The output matrix should
        be applied to no others (`mlx_provider.families.logits`).
        """


@runtime_checkable
class ShowsHidden(Protocol):
    """A `LoadedModel` that hands out hidden states, as some drafters and embeddings need them."""

    @property
    def shows_hidden(self) -> bool:
        """Whether this one does: what is below its output matrix may not be known."""

    def decode_hidden(
        self,
        tokens: mx.array,
        cache: list[Any],
        positions: mx.array,
        logits_at: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """As `decode`: logits (L, vocab), and the states (L, hidden) that the output matrix made
        them from."""

    def prefill_hidden(self, chunk: PrefillChunk, last: int) -> tuple[mx.array, mx.array]:
        """As `prefill`: logits (vocab,), and the states (last, hidden) after the chunk's last
        tokens."""


@runtime_checkable
class ShowsLogits(Protocol):
    """A `LoadedModel` that tells how likely each token of a prompt was."""

    def prefill_logits(self, chunk: PrefillChunk) -> mx.array:
        """As `prefill`: logits (length, vocab) after every token of a chunk of text."""


@dataclass(frozen=True)
class ModelFamily:
    """How to recognise and load the models of one family."""

    name: str
    matches: Callable[[Mapping[str, Any]], int]
    """Priority for a `config.json`: 0 not mine; 1 generic fallback; 10 a family of its own."""
    load: Callable[[Path, LoadOptions], LoadedModel]
    """Load a folder (engine thread). Raises errors of `mlx_provider.errors`."""
    serves: str = ""
    """One line for people: which models this family serves."""
    recommended: Mapping[str, int] = field(default_factory=dict)
    """Hub ids of its models that suit coding agents, with the bytes of their weights, about."""
    patches: tuple[UpstreamPatch, ...] = ()
    """What of upstream `load` replaces."""
    sampling: Mapping[str, SamplingDefaults] = field(default_factory=dict)
    """What authors publish, by `model_type`, for models whose files name no sampling."""
