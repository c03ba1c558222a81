"""Model families: everything about a model that the core does not know.

Of a `LoadedModel`, `prepare` runs on any thread and touches no `mx` array. The other methods run
only on the engine thread and keep no state on the model object."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

from .extensions import UpstreamPatch

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np
    from numpy.typing import NDArray


_T = TypeVar("_T")
Size = tuple[int, int]
"""(height, width)."""
BICUBIC = 3
"""One of Pillow's filters (PIL/Image.py, `Resampling`)."""
Pooling = Literal["last", "mean", "cls"]
"""The state of the last token, the mean of all states, or the state of the first token."""
Features = Any
"""What `LoadedModel.embed` returns for one media item; opaque to the core, cached by hash."""


def scale_pixels(pixels: NDArray[np.uint8], size: Size | None, resample: int) -> NDArray[np.uint8]:
    """Pixels ((frames,) H, W, 3) at another size, by Pillow's filter; `None`: as they are."""
    if size is None or pixels.shape[-3:-1] == size:
        return pixels
    import numpy as np
    from PIL import Image

    if pixels.ndim == 4:
        return np.stack([scale_pixels(frame, size, resample) for frame in pixels])
    return np.asarray(Image.fromarray(pixels).resize(size[::-1], resample))


@dataclass(frozen=True)
class Embedding:
    """How a model's hidden states (`HiddenStatesModel`) become a vector of `width` numbers."""

    width: int = 0
    pooling: Pooling | None = None
    """`None`: the model's files do not say; the operator must choose."""
    normalise: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that go before an input, by the name that a client gives."""
    default_prompt: str = ""
    """Name of the default prompt; empty: none."""
    refusal: str = ""
    """Why it cannot embed; empty: it can."""


@dataclass(frozen=True)
class TemplateForm:
    """What a chat template demands; `families.tokenizer.template_probe` finds it by rendering."""

    empty_content: Literal["null", "empty", "absent"] = "null"
    """`content` of a turn that only calls tools."""
    arguments: Literal["mapping", "text"] = "mapping"
    """Arguments of a call: an object, or its JSON text."""
    short_ids: bool = False
    """Call ids must be nine letters and digits."""
    named_ids: bool = False
    """A call's id is `functions.NAME:INDEX`, where `INDEX` counts the calls of the conversation."""
    text_with_calls: Literal["together", "apart", "dropped"] = "together"
    """Text beside calls of a turn. `apart`: a turn before the calls; `dropped`: not rendered."""
    parallel_calls: bool = True
    """A turn can have several calls; if not, each is a turn with its result."""
    user_after_result: bool = True
    """A user's message can follow a result; if not, its text is added to the result."""
    lone_system: bool = True
    """A system message can be the only message; if not, it becomes the user's."""
    thought_with_text: bool = True
    """A turn with calls can have thoughts and text; if not, the thoughts begin the text."""
    thought_with_calls: bool = False
    """Where the text is a separate turn: thoughts belong to the turn with the calls."""
    text_parts: frozenset[str] = frozenset()
    """Roles whose text can have several parts; for others the parts are joined."""
    parts_only: bool = False
    """Only text in parts reaches the prompt, not a string."""
    takes_calls: bool = True
    """Calls and results reach the prompt; if not, they are written as text."""
    shows_tools: Literal["always", "with_system", "never"] = "always"
    """`with_system`: only with a system message. Tools that are not shown are described in one."""
    tool_fields: frozenset[str] = frozenset()
    """Fields that every tool must have: `description`, `parameters`, `properties` (a description
    of each parameter), `additionalProperties` (in each object)."""
    type_lists: bool = True
    """A parameter's `type` can be a list."""


@dataclass(frozen=True)
class LoadOptions:
    """The operator's options for this model (`model_info` of the config entry)."""

    adapter: Path | None = None
    trust_remote_code: bool = False
    context_length: int | None = None
    """In tokens. `None`: that of the model's config."""
    modality: Literal["auto", "text"] = "auto"
    """`text`: load only the weights of the text model."""
    extra: Mapping[str, Any] = field(default_factory=dict)  # as the operator wrote it, for `load`
    dtype: str | None = None
    """Expand all weights to this dtype after loading (`float32`, ...), quantised ones, too."""


@dataclass(frozen=True)
class SamplingDefaults:
    """The model's own sampling defaults (generation_config.json); `None`: not set."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class ModelInfo:
    """What the core has to know of a loaded model."""

    model_type: str
    context_length: int
    vocab_size: int
    """Rows of the output matrix: valid token ids are `0 .. vocab_size - 1`."""
    stop_tokens: frozenset[int]
    fingerprint: str
    """Differs whenever the same tokens could give other KV (weights, adapter, quantisation)."""
    weights_bytes: int
    precision: Literal["float32", "low"]
    """`low`: 16-bit or quantised weights; the batch size may change the last bits."""
    chat_template: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    sampling: SamplingDefaults = SamplingDefaults()
    media: frozenset[str] = frozenset()
    """Kinds of media the model takes: `image`, `video`."""
    hoist_system: bool = False
    """The template refuses system messages after the first: later ones move to the front."""
    alternate: bool = False
    """The template demands that user and assistant take turns, the user first."""
    system_role: bool = True
    """The template shows system messages; if not, they become the user's text."""
    tool_media: bool = False
    """The template shows images inside tool results."""
    template: TemplateForm = field(default_factory=TemplateForm)
    """The form in which the chat template takes messages and tools."""
    min_pixels: int = 0
    max_pixels: int = 0
    """Pixels of an image after the family's scaling; 0: no image input."""
    embedding: Embedding = field(default_factory=Embedding)
    notes: tuple[str, ...] = ()
    """Notes for the operator on how the model is served."""


@dataclass(frozen=True)
class MediaItem:
    """One image, or the frames of one video, encoded: each access to its pixels decodes it."""

    kind: Literal["image", "video"]
    shape: tuple[int, ...]
    """(frames,) H, W, 3."""
    decode: Callable[[Size | None, int], NDArray[np.uint8]]
    """(size, or `None` for its own; filter) -> pixels, as `pixels` and `scale` return them."""
    content_hash: str
    """SHA-256 of the original bytes and of everything that changes the pixels."""
    detail: Literal["auto", "low", "high"] = "auto"
    path: str = ""
    """The part of the request that holds it, for errors."""

    @classmethod
    def of(cls, kind: Literal["image", "video"], pixels: NDArray[np.uint8], key: str) -> MediaItem:
        """An item of pixels that are decoded already. `key`: their content hash."""
        return cls(kind, pixels.shape, partial(scale_pixels, pixels), key)

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """uint8, (frames,) H, W, 3; may be read-only. Raises `MediaError`."""
        return self.decode(None, BICUBIC)

    def scale(self, height: int, width: int, resample: int = BICUBIC) -> NDArray[np.uint8]:
        """uint8, (frames,) height, width, 3. `resample`: Pillow's filter. An image at least four
        times as high and wide is first averaged over squares. Raises `MediaError`."""
        return self.decode((height, width), resample)


class OnDemand(Generic[_T]):
    """A value that is made at the first call, and again after `drop`. Safe from any thread."""

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self._made: tuple[_T] | None = None
        self._lock = threading.Lock()

    def __call__(self) -> _T:
        with self._lock:
            if self._made is None:
                self._made = (self._make(),)
            return self._made[0]

    def drop(self) -> None:
        self._made = None


@dataclass(frozen=True)
class MediaSpan:
    """The tokens `start .. end` of a prompt, which stand for one media item."""

    start: int
    end: int
    content_hash: str
    inputs: Any
    """What `LoadedModel.embed` needs (numpy arrays)."""
    ready: OnDemand[Any] | None = None
    """The part of `inputs` that takes memory and time: made on a host thread unless the features
    are cached, and dropped after the prefill."""


@dataclass(frozen=True)
class Prompt:
    """A rendered, tokenised request."""

    tokens: Sequence[int]
    text: str = ""
    """The rendered template before media expansion."""
    spans: Sequence[MediaSpan] = ()
    positions: NDArray[np.int32] | None = None
    """(3, length) rotary positions, if they differ from 0 .. length - 1."""
    rope_delta: int = 0
    """Position of the first generated token minus the prompt's length."""
    snapshot_points: Sequence[int] = ()
    """Ascending token counts at message ends, where state is worth a snapshot."""

    def followed_by(self, tokens: Sequence[int]) -> Prompt:
        """The prompt with text tokens after it (a reply that is prefilled again)."""
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
    """Tokens `start .. stop` of a row's prompt, which go to the end of the row's cache."""

    prompt: Prompt
    start: int
    stop: int
    cache: list[Any]
    features: Mapping[str, Features] = field(default_factory=dict)
    """Features of the prompt's media by content hash."""


class Tokenizer(Protocol):
    @property
    def fast(self) -> Any:
        """The `tokenizers.Tokenizer` behind it."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids. `special`: add BOS and similar tokens as in the model's config."""

    def encode_plain(self, text: str, *, before: str = "", special: bool = False) -> list[int]:
        """Token ids of `before`, which can contain control tokens, and a client's `text`, in which
        they are spelt in letters. `special`: as in `encode`."""

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str: ...


class LoadedModel(Protocol):
    """A model with its weights in memory."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def model(self) -> Any:
        """The `mlx.nn.Module` in whose modules kernels replace functions; anything else: none."""

    @property
    def kv_layouts(self) -> Sequence[str]:
        """To probe, best first: `grouped` (one pass), `merged` (one per similar length), `solo`."""

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        media: Sequence[MediaItem],
        variables: Mapping[str, Any],
    ) -> Prompt:
        """Render normalised messages with the chat template and tokenise them. Only the template
        writes control tokens. `media`: in the order of the `image` and `video` parts. Raises
        `BadRequest` if the template refuses the messages."""

    def embed(self, span: MediaSpan) -> Features:
        """Run the vision tower on one item (engine thread)."""

    def make_cache(self) -> list[Any]:
        """A new, empty cache for one row: one entry per layer."""

    def prefill(self, chunk: PrefillChunk) -> mx.array:
        """Append a chunk to the row's cache. Returns the logits (vocab,) after its last token."""

    def decode(
        self,
        tokens: mx.array,
        cache: list[Any],
        positions: mx.array,
        logits_at: mx.array | None = None,
    ) -> mx.array:
        """Decode one token for each of B rows. tokens: (B,) int32; positions: (B,) int32, the
        rotary position of each token; `cache`: of all rows. Returns logits (B, vocab).

        In the layout `grouped`, the last rows may be text tokens of one prompt; then `logits_at`,
        (L,) int32, selects the logits to return, (L, vocab). Apply the output matrix only to these
        (`mlx_provider.families.logits`)."""


@runtime_checkable
class HiddenStatesModel(Protocol):
    """A `LoadedModel` that returns hidden states, for drafters and embeddings."""

    @property
    def has_hidden_states(self) -> bool:
        """False: the states before its output matrix are not accessible."""

    def decode_hidden(
        self,
        tokens: mx.array,
        cache: list[Any],
        positions: mx.array,
        logits_at: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """As `decode`: logits (L, vocab), and the states (L, hidden) before the output matrix."""

    def prefill_hidden(self, chunk: PrefillChunk, last: int) -> tuple[mx.array, mx.array]:
        """As `prefill`: logits (vocab,), and the states (last, hidden) after its last tokens."""


@runtime_checkable
class PromptLogitsModel(Protocol):
    """A `LoadedModel` that returns the logits of all tokens of a prompt."""

    def prefill_logits(self, chunk: PrefillChunk) -> mx.array:
        """As `prefill`: logits (length, vocab) after every token of a chunk of text."""


@dataclass(frozen=True)
class ModelFamily:
    """How the models of one architecture are recognised and loaded."""

    name: str
    matches: Callable[[Mapping[str, Any]], int]
    """Priority for a `config.json`: 0: not served; 1: generic fallback; 10: its own family."""
    load: Callable[[Path, LoadOptions], LoadedModel]
    """Load a folder (engine thread). Raises errors of `mlx_provider.errors`."""
    serves: str = ""
    """One line for people: the models that it serves."""
    recommended: Mapping[str, int] = field(default_factory=dict)
    """Hub ids of models for coding agents, with the approximate bytes of their weights."""
    patches: tuple[UpstreamPatch, ...] = ()
    """Functions of upstream that `load` replaces."""
    sampling: Mapping[str, SamplingDefaults] = field(default_factory=dict)
    """Published sampling values, by `model_type`, for models whose files name none."""
