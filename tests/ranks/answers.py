"""What a rank computes: the program of the tests here, and by itself the reference."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_provider import (
    LoadedModel,
    LoadOptions,
    MLXProviderError,
    PrefillChunk,
    Prompt,
    SpreadsFeatures,
)
from mlx_provider.records.features import leaves, outline, rebuilt
from mlx_provider.testing.tiny.greedy import continue_greedily, features_of, start
from mlx_provider.testing.tiny.media import tiny_image
from mlx_provider.upstream.pipelines import layers_of
from rank_group import tell

TEXT = "hello there, and how many words may this question have before it ends"
CHUNK = 12


def answer(job: Mapping[str, Any], group: Any = None) -> dict[str, Any]:
    """What a model gives for one prompt; `refused`: why it was not loaded."""
    plugin = importlib.import_module(job["plugin"])
    family = next(iter(plugin.mlx_model_families()))
    mx.reset_peak_memory()
    try:
        model = family.load(Path(job["folder"]), LoadOptions(group=group))
    except MLXProviderError as error:
        return {"refused": f"{type(error).__name__}: {error}", "param": error.param}
    loaded = {"bytes": model.info.weights_bytes, "peak": mx.get_peak_memory()}
    prompt = prompt_for(model)
    row = start(model, prompt, chunk=CHUNK, features=shared_features(model, prompt, group))
    first = np.array(row.logits.astype(mx.float32)).tolist()
    tokens = continue_greedily(model, [row], row.cache, job["count"])[0]
    count = len(row.cache)
    if group is not None and job["layered"]:  # a cache behind those of the layers counts tokens
        count = len(layers_of(model.model))  # type: ignore[attr-defined]
    return loaded | {
        "apart": evaluated_apart(model, group) if job["layered"] else [],
        "info": [model.info.fingerprint, model.info.precision, sorted(model.info.media)],
        "logits": first,
        "tokens": tokens,
        "kv": [int(c.nbytes) for c in row.cache[:count]],
    }


def evaluated_apart(model: LoadedModel, group: Any) -> list[Any]:
    """Logits of two calls, which rank 0 evaluates in one order and others in the other."""
    cache = [model.make_cache(), model.make_cache()]
    prompts = [Prompt([start, 7, 9]) for start in (5, 11)]
    found = [model.prefill(PrefillChunk(p, 0, 3, c)) for p, c in zip(prompts, cache, strict=True)]
    leads = group is None or group.rank() == 0
    for logits in found if leads else found[::-1]:
        mx.eval(logits)
    return [np.array(logits.astype(mx.float32)).tolist() for logits in found]


def prompt_for(model: LoadedModel) -> Prompt:
    """Text, and two images where the model sees."""
    sees = "image" in model.info.media
    images = [tiny_image(1, 96, 64), tiny_image(2, 64, 64)] if sees else []
    parts = [{"type": "text", "text": TEXT}, *({"type": "image"} for _ in images)]
    messages = [{"role": "user", "content": parts if sees else TEXT}]
    return model.prepare(messages, tools=[], media=images, variables={})


def shared_features(model: LoadedModel, prompt: Prompt, group: Any) -> dict[str, Any]:
    """Features that the first rank makes, on every rank."""
    if group is None:
        return features_of(model, prompt)
    leads = group.rank() == 0
    made = features_of(model, prompt) if leads else {}
    if not prompt.spans:
        return {}
    assert isinstance(model, SpreadsFeatures)
    types = model.feature_types
    plan = shared_json([[k, outline(v, types)] for k, v in made.items()] if leads else None, group)
    found = {}
    for key, described in plan:
        own = leaves(made[key]) if leads else [None] * len(list(_arrays(described)))
        arrays = [
            shared_array(array, shape, dtype, group)
            for array, (shape, dtype) in zip(own, _arrays(described), strict=True)
        ]
        found[key] = rebuilt(described, arrays, types)
    return found


def _arrays(described: Sequence[Any]) -> Any:
    if described[0] == "array":
        yield described[1:]
    elif described[0] != "value":
        for inner in described[-1]:
            yield from _arrays(inner)


def shared_json(value: Any, group: Any) -> Any:
    raw = json.dumps(value).encode() if group.rank() == 0 else b""
    length = int(mx.distributed.all_sum(mx.array(len(raw)), group=group).item())
    own = np.frombuffer(raw.ljust(length, b"\0"), np.uint8).astype(np.int32)
    return json.loads(bytes(np.array(mx.distributed.all_sum(mx.array(own), group=group)).tolist()))


def shared_array(array: mx.array | None, shape: Sequence[int], dtype: str, group: Any) -> mx.array:
    own = mx.zeros(shape, getattr(mx, dtype)) if array is None else array
    found = mx.distributed.all_sum(own, group=group)
    mx.eval(found)
    return found


def main() -> None:
    group = mx.distributed.init(strict=True)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    tell(group.rank(), [answer(job, group) for job in jobs])


if __name__ == "__main__":
    main()
