"""What the model computes is what transformers computes, by frozen answers and, where torch is,
by fresh ones."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_provider_lfm3 import load
from mlx_provider_lfm3.convert import convert
from mlx_provider_lfm3.model import ModelArgs, layer_kinds

from mlx_provider import LoadedModel, LoadOptions, PrefillChunk, Prompt, UnsupportedModel

HERE = Path(__file__).parent
REFERENCE = HERE / "reference"
CLOSE = 2e-4
"""Of logits up to 7, in float32; the kernels of two libraries sum in another order."""
Answers = dict[str, mx.array]


def answers(folder: Path) -> Answers:
    return mx.load(str(folder / "answers.safetensors"))


def logits_of(model: LoadedModel, tokens: list[int], chunk: int) -> tuple[mx.array, list[object]]:
    """After each token of a prompt that is prefilled by so many at a time; and the row's cache."""
    cache, found = model.make_cache(), []
    for start in range(0, len(tokens), chunk):
        stop = min(start + chunk, len(tokens))
        found.append(model.prefill_logits(PrefillChunk(Prompt(tokens), start, stop, cache)))
    return mx.concatenate(found), cache


def reply_of(model: LoadedModel, tokens: list[int], count: int) -> list[int]:
    """Greedy."""
    logits, cache = logits_of(model, tokens, len(tokens))
    found = [int(mx.argmax(logits[-1]))]
    while len(found) < count:
        position = len(tokens) + len(found) - 1
        after = model.decode(mx.array(found[-1:]), cache, mx.array([position]))
        found.append(int(mx.argmax(after[0])))
    return found


def check(model: LoadedModel, wanted: Answers, chunk: int) -> None:
    tokens = wanted["prompt"].tolist()
    logits, _ = logits_of(model, tokens, chunk)
    assert float(mx.abs(logits - wanted["logits"]).max()) < CLOSE
    assert reply_of(model, tokens, len(wanted["reply"])) == wanted["reply"].tolist()


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(REFERENCE, LoadOptions(dtype="float32"))


@pytest.mark.parametrize("chunk", [1, 5, 13, 1000])
def test_logits_and_a_reply_are_those_of_transformers(model: LoadedModel, chunk: int) -> None:
    check(model, answers(REFERENCE), chunk)


def test_the_chat_template_gives_the_tokens_of_transformers(model: LoadedModel) -> None:
    messages = [{"role": "user", "content": "What does a window keep of a text?"}]
    prompt = model.prepare(messages, tools=[], media=[], variables={})
    assert list(prompt.tokens) == answers(REFERENCE)["prompt"].tolist()


def test_missing_config_fields_have_the_defaults_of_transformers() -> None:
    from transformers import Lfm3Config

    theirs, ours = Lfm3Config(), ModelArgs()
    assert layer_kinds(theirs.num_hidden_layers) == theirs.layer_types
    for name in vars(ours):
        assert getattr(theirs, name) == getattr(ours, name), name


def test_a_converted_checkpoint_has_the_same_logits(model: LoadedModel, tmp_path: Path) -> None:
    converted = load(convert(REFERENCE, tmp_path / "new"), LoadOptions(dtype="float32"))
    tokens = answers(REFERENCE)["prompt"].tolist()
    assert mx.array_equal(logits_of(converted, tokens, 16)[0], logits_of(model, tokens, 16)[0])


def test_four_bit_weights_take_less_memory_and_equal_their_expanded_logits(
    in_float32: Callable[[Path], Path], tmp_path: Path
) -> None:
    """Scales in float32, so that nothing but the layers' four bits can differ."""
    plain = in_float32(tmp_path / "plain")
    folder = convert(plain, tmp_path / "new", bits=4, group=32)
    assert json.loads((folder / "config.json").read_text())["quantization"]["bits"] == 4
    small, expanded = load(folder, LoadOptions()), load(folder, LoadOptions(dtype="float32"))
    assert small.info.weights_bytes < expanded.info.weights_bytes / 4
    tokens = answers(REFERENCE)["prompt"].tolist()
    found, wanted = logits_of(small, tokens, 16)[0], logits_of(expanded, tokens, 16)[0]
    assert float(mx.abs(found - wanted).max()) < CLOSE


def test_convert_does_not_overwrite_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(FileExistsError, match="not empty"):
        convert(REFERENCE, tmp_path)


def test_an_untied_output_matrix_and_a_config_without_gates_are_loaded(tmp_path: Path) -> None:
    """What the published models do not have, and their config may say."""
    folder = Path(shutil.copytree(REFERENCE, tmp_path / "changed"))
    weights = mx.load(str(folder / "model.safetensors"))
    left = {name: value for name, value in weights.items() if "gate_proj" not in name}
    left["lm_head.weight"] = 2 * weights["model.embed_tokens.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), left, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    said = {"tie_word_embeddings": False, "use_attention_gate": False}
    (folder / "config.json").write_text(json.dumps(config | said))
    tokens = answers(REFERENCE)["prompt"].tolist()
    untied = logits_of(load(folder, LoadOptions(dtype="float32")), tokens, 16)[0]
    (folder / "config.json").write_text(json.dumps(config | said | {"tie_word_embeddings": True}))
    tied = logits_of(load(folder, LoadOptions(dtype="float32")), tokens, 16)[0]
    assert mx.allclose(untied, 2 * tied, atol=1e-3)


def test_layers_of_another_kind_are_refused_by_name(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(REFERENCE, tmp_path / "changed"))
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"][1] = "linear_attention"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="linear_attention"):
        load(folder, LoadOptions())


def test_frozen_reference_logits_equal_those_of_the_installed_transformers(tmp_path: Path) -> None:
    """The frozen ones are still those of the installed transformers."""
    pytest.importorskip("torch")
    command = [sys.executable, HERE / "make_reference.py", tmp_path / "fresh"]
    subprocess.run(command, check=True, timeout=600)
    fresh, frozen = answers(tmp_path / "fresh"), answers(REFERENCE)
    assert fresh["prompt"].tolist() == frozen["prompt"].tolist()
    assert float(mx.abs(fresh["logits"] - frozen["logits"]).max()) < CLOSE
    check(load(tmp_path / "fresh", LoadOptions(dtype="float32")), fresh, 13)
