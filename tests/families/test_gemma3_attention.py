"""Gemma 3: image tokens see their whole image; windows; the window override."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from greedy import features_of, greedy, start
from mlx_provider import BadRequest, LoadOptions, Prompt
from mlx_provider.registry import PluginRegistry
from mlx_provider_gemma3 import load_text, matches_text
from mlx_provider_gemma3.model import WINDOW_VARIABLE, chosen_window
from tiny.models import tiny_image
from tolerances import logprob_tolerance

from .conftest import PLUGINS, family_of

WINDOW = 24
LONG = "The quick brown fox asks the lazy dog what the weather is like in Paris. " * 3


def reference_masks(prompt: Prompt, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The masks token by token, as transformers' Gemma 3 defines them."""
    image = [-1] * length
    for number, span in enumerate(prompt.spans):
        image[span.start : span.end] = [number] * (span.end - span.start)
    full, sliding = np.zeros((2, length, length), bool)
    for q in range(length):
        for k in range(length):
            full[q, k] = k <= q or (image[q] >= 0 and image[q] == image[k])
            sliding[q, k] = full[q, k] and k > q - WINDOW
    return full, sliding


def reference_logits(model: Any, prompt: Prompt, tokens: list[int]) -> mx.array:
    """Logits after `tokens` in one uncached pass over everything."""
    language = model.model.language_model
    ids = mx.array([*prompt.tokens, *tokens])
    hidden = language.model.embed_tokens(ids) * language.config.hidden_size**0.5
    known = features_of(model, prompt)
    for span in prompt.spans:
        hidden[span.start : span.end] = known[span.content_hash].rows
    full, sliding = map(mx.array, reference_masks(prompt, len(ids)))
    hidden = hidden[None]
    for layer in language.layers:
        hidden = layer(hidden, sliding if layer.self_attn.is_sliding else full, None)
    return language.lm_head(language.model.norm(hidden))[0, -1]


@pytest.mark.parametrize(
    "parts",
    [
        ("What is this?", tiny_image(1)),
        (tiny_image(1), tiny_image(2), "Compare them"),
        (LONG[:80], tiny_image(3), LONG[:40]),
    ],
    ids=["image", "two images", "image beyond the window"],
)
def test_images_are_seen_as_in_the_reference(parts: Any, load, ask) -> None:
    model = load("gemma3")
    prompt = ask(model, *parts)
    out: list[int] = []
    for _ in range(10):
        out.append(int(mx.argmax(reference_logits(model, prompt, out))))
    for chunk in (0, 1, 5, 30):
        assert greedy(model, prompt, 10, chunk=chunk) == out


def test_first_image_token_sees_the_last(load, ask) -> None:
    model = load("gemma3")
    prompt = ask(model, "What is this?", tiny_image(1))
    known = features_of(model, prompt)
    (features,) = known.values()
    key_before = first_image_key(model, prompt, known)
    features.rows[-1] = features.rows[-1] + 3.0
    assert float(mx.abs(first_image_key(model, prompt, known) - key_before).max()) > 1e-3


def first_image_key(model: Any, prompt: Prompt, known: dict[str, Any]) -> mx.array:
    """What the last layer caches for the first token of the image."""
    row = start(model, prompt, features=known)
    return row.cache[-1].keys[0, :, prompt.spans[0].start]


def test_a_prompt_longer_than_the_window_gives_equal_tokens_in_any_chunks(load, ask) -> None:
    model = load("gemma3")
    prompt = ask(model, LONG)
    assert len(prompt.tokens) > 3 * WINDOW
    row = start(model, prompt)
    rings = [entry for entry in row.cache if isinstance(entry, RotatingKVCache)]
    assert len(rings) == 1
    assert all(entry.max_size == WINDOW for entry in rings)
    assert greedy(model, prompt, 10, chunk=7) == greedy(model, prompt, 10)


def test_the_window_changes_logits(folders, load, ask, monkeypatch: pytest.MonkeyPatch) -> None:
    family = family_of(PLUGINS["gemma3"])
    plain = load("gemma3")
    prompt = ask(plain, LONG, tiny_image(1))
    known = features_of(plain, prompt)
    results = {}
    for window in ("12", "1000", "0"):
        monkeypatch.setenv(WINDOW_VARIABLE, window)
        model = family.load(folders("gemma3"), LoadOptions())
        results[window] = np.array(start(model, prompt, features=known).logits)
        kinds = {type(entry) for entry in model.make_cache()}
        assert kinds == ({KVCache} if window == "0" else {KVCache, RotatingKVCache})
        assert model.info.fingerprint != plain.info.fingerprint
    normal = np.array(start(plain, prompt, features=known).logits)
    assert np.abs(results["12"] - normal).max() > 1e-2
    assert np.abs(results["0"] - normal).max() > 1e-2
    # a window that holds the whole prompt is no window
    np.testing.assert_allclose(results["1000"], results["0"], atol=logprob_tolerance())


def test_the_window_changes_a_text_only_model(folders, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((folders("gemma3_text") / "config.json").read_text())
    family, _ = PluginRegistry.discover({}).family_for(config)
    messages = [{"role": "user", "content": LONG}]
    logits, fingerprints = {}, set()
    for window in ("", "12", "1000", "0"):
        monkeypatch.setenv(WINDOW_VARIABLE, window)
        model = family.load(folders("gemma3_text"), LoadOptions())
        prompt = model.prepare(messages, tools=[], media=[], variables={})
        logits[window] = np.array(start(model, prompt, chunk=40).logits)
        fingerprints.add(model.info.fingerprint)
        rings = [c for c in model.make_cache() if isinstance(c, RotatingKVCache)]
        assert [c.max_size for c in rings] == ([] if window == "0" else [int(window or WINDOW)])
    assert len(fingerprints) == 4
    assert np.abs(logits["12"] - logits[""]).max() > 1e-2
    assert np.abs(logits["0"] - logits[""]).max() > 1e-2
    np.testing.assert_allclose(logits["1000"], logits["0"], atol=logprob_tolerance())


def test_a_text_only_config_in_the_outer_form_loads_as_gemma3(folders, tmp_path: Path) -> None:
    """mlx-lm converts Gemma 3 of text alone with the outer config of one that sees, too."""
    folder = Path(shutil.copytree(folders("gemma3"), tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("vision_config")
    assert matches_text(config) == 10
    (folder / "config.json").write_text(json.dumps(config))
    prompt = [{"role": "user", "content": LONG}]
    plain = load_text(folder, LoadOptions())
    tokens = plain.prepare(prompt, tools=[], media=[], variables={})
    whole = family_of(PLUGINS["gemma3"]).load(folders("gemma3"), LoadOptions())
    assert greedy(plain, tokens, 8) == greedy(whole, tokens, 8)


def test_the_window_variable_is_parsed_or_refused() -> None:
    assert chosen_window({}) is None
    assert chosen_window({WINDOW_VARIABLE: ""}) is None
    assert chosen_window({WINDOW_VARIABLE: "4096"}) == 4096
    with pytest.raises(BadRequest, match=WINDOW_VARIABLE):
        chosen_window({WINDOW_VARIABLE: "large"})
