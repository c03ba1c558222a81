"""`mlx-provider plan` as users call it: tables, JSON, what pays, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mlx_provider.cli.app import build as command_line
from mlx_provider.errors import MLXProviderError
from mlx_provider.planning import link, machines
from mlx_provider.registry import PluginRegistry
from mlx_provider.testing.tiny_models import build

RUN = CliRunner()
WIDE = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 8,
    "intermediate_size": 347_136,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
    "quantization": {"group_size": 64, "bits": 4},
}
"""As many weights as a model of 70B has, in a tenth of the layers, which take time to describe."""


@pytest.fixture
def large(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(WIDE))
    return str(path)


def planned(*arguments: str) -> dict[str, Any]:
    return dict(json.loads(printed(*arguments, "--json")))


def printed(*arguments: str) -> str:
    cli = command_line(PluginRegistry.discover({"MLX_PROVIDER_PLUGINS": ""}))
    return RUN.invoke(cli, ["plan", *arguments], catch_exceptions=False).output


def test_a_model_that_one_machine_does_not_hold(large: str) -> None:
    found = planned(large, "--machines", "2x m4-max-64gb", "--context", "8192")
    first, second = found["machines"]["ranks"]
    assert (found["alone"]["fits"], found["machines"]["fits"]) == (False, True)
    assert first["weights"] == second["weights"]
    # 4.5 bits each; the embedding and the head are on both
    layers = 8 * 8192 * (2 * 8192 + 2 * 1024 + 3 * 347_136)
    assert first["weights"] == pytest.approx((layers / 2 + 2 * 8192 * 128_256) * 4.5 / 8, rel=1e-4)
    assert first["kv_per_token"] == 2 * 4 * 128 * 2 * 8
    collectives = found["machines"]["collectives"]
    assert (collectives["per_step"], collectives["all_sums"]) == (17, 16)
    assert collectives["bytes_per_prompt_token"] == 16 * 8192 * 2
    assert collectives["bytes_per_token"] == collectives["bytes_per_prompt_token"] + 4
    assert "does not fit on one of these machines, and fits on 2" in found["verdict"]
    assert "estimate" in found["nature"]
    assert found["alone"]["collectives"]["bytes_per_token"] == 0


ODD = {
    "model_type": "qwen2",
    "num_attention_heads": 42,
    "num_key_value_heads": 7,
    "num_hidden_layers": 6,
    "hidden_size": 5376,
}


def test_layers_one_after_another_are_no_faster(large: str) -> None:
    """Four machines share memory; a step of all layers takes what one machine would need."""
    Path(large).write_text(json.dumps(WIDE | ODD | {"intermediate_size": 147_456}))
    found = planned(large, "--machines", "4x m4-max-64gb", "--context", "8192")
    assert found["machines"]["split_by"] == "layers"
    assert [rank["layers"] for rank in found["machines"]["ranks"]] == [2, 2, 1, 1]
    assert found["machines"]["collectives"]["hand_overs"] == 3
    together, alone = (found[name]["decode"]["reading_seconds"] for name in ("machines", "alone"))
    assert together == pytest.approx(alone, rel=1e-4)  # each has the last norm
    prompts = (found[name]["prefill"]["computing_seconds"] for name in ("machines", "alone"))
    assert next(prompts) == pytest.approx(next(prompts))
    told = printed(large, "--machines", "4x m4-max-64gb", "--context", "8192")
    assert "2, 2, 1, 1 layers by rank, one after another" in " ".join(told.split())


def test_the_largest_machine_is_looked_at_alone(large: str) -> None:
    found = planned(large, "--machines", "m4-max-64gb, m3-ultra-256gb", "--context", "1024")
    assert [rank["machine"] for rank in found["alone"]["ranks"]] == ["m3-ultra-256gb"]
    slowest = planned(large, "--machines", "2x m4-max-64gb", "--context", "1024")
    assert found["machines"]["decode"] == slowest["machines"]["decode"]


def test_a_split_head_gathers_logits(tmp_path: Path) -> None:
    folder = build(tmp_path / "m", "qwen3_5_text")
    found = planned(str(folder), "--machines", "2x64GB:400GB/s")["machines"]["collectives"]
    assert found["gathers_logits"]
    assert found["per_step"] == found["all_sums"] + 2


@pytest.mark.parametrize(
    ("over", "told"),
    [("jaccl", "2 machines may pay in speed"), ("100ms:1GB/s", "one machine decodes as fast")],
)
def test_it_is_said_whether_a_second_machine_pays(large: str, over: str, told: str) -> None:
    found = planned(large, "--machines", "m3-ultra-256gb x2", "--link", over)
    assert told in found["verdict"]
    alone, both = (found[name]["decode"] for name in ("alone", "machines"))
    assert both["reading_seconds"] < alone["reading_seconds"]
    assert alone["collective_seconds"] == 0 < both["collective_seconds"]
    assert any(line.startswith(over) for line in found["basis"])


def test_a_prompt_takes_what_was_published(large: str) -> None:
    """123 billion weights in four bits read 2,048 tokens at 91.5 a second on one M3 Ultra
    (ml-explore/mlx, pull request 3094)."""
    config = WIDE | {"hidden_size": 12_288, "num_attention_heads": 96, "vocab_size": 131_072}
    eight = {"num_hidden_layers": 8, "intermediate_size": 28_672}
    Path(large).write_text(json.dumps(config | eight))
    found = planned(large, "--machines", "m3-ultra-512gb", "--context", "2048")
    of_88_layers = 88 / 8 * found["machines"]["prefill"]["seconds"]
    assert of_88_layers == pytest.approx(2048 / 91.5, rel=0.1)


def test_more_requests_and_more_context_take_longer(large: str) -> None:
    def decode(context: int, rows: int) -> float:
        options = ("--context", str(context), "--rows", str(rows))
        found = planned(large, "--machines", "m3-ultra-256gb x2", *options)["machines"]
        return float(found["decode"]["reading_seconds"])

    assert decode(1024, 1) < decode(32_768, 1) < decode(32_768, 4)


def test_the_table_names_ranks_and_says_that_it_is_an_estimate(large: str) -> None:
    text = " ".join(printed(large, "--machines", "m4-max-64gb, m3-ultra-256gb").split())
    for told in ("estimate", "fits", "m3-ultra-256gb", "17 collectives a step", "assumed"):
        assert told in text


def test_one_machine_exchanges_nothing() -> None:
    text = printed("demo", "--machines", "64GB:400GB/s")
    assert "exchanges nothing" in text
    assert "it fits on this machine" in text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("m9-max-64gb", "no known machine.*m4-max"),
        ("m4-max", "no known machine"),
        ("m4-max-lots", "no memory"),
        ("64GB:400", "no bandwidth"),
        ("64GB:0GB/s", "no bandwidth"),
        ("-64GB:1GB/s", "no memory"),
        ("64GB:1GB/s:much", "no compute"),
        ("64GB:1GB/s:1TFLOPS:1", "no machine"),
        ("0x64GB:1GB/s", "from 1 to 64"),
        ("64GB:1GB/s x 9999999999999", "from 1 to 64"),
        ("60x64GB:1GB/s, 60x64GB:1GB/s", "more than 64"),
        ("", "no known machine"),
        ("m4-max-64gb,", "no known machine"),
    ],
)
def test_machines_that_cannot_be_read_are_named(text: str, told: str) -> None:
    with pytest.raises(MLXProviderError, match=told):
        machines(text)


@pytest.mark.parametrize(
    "text", ["m4-max-64gb x2", "2x m4-max-64gb", "2 × M4-Max-64GB", "m4-max-64gb, m4-max-64gb"]
)
def test_two_machines_are_written_in_several_ways(text: str) -> None:
    assert machines(text) == machines("2xm4-max-64gb")


def test_figures_make_a_machine() -> None:
    [given] = machines("64GB:400GB/s:11.5TFLOPS")
    assert given.memory == 64 * 2**30
    assert (given.chip.bytes, given.chip.products) == (pytest.approx(360e9), 11.5e12)


@pytest.mark.parametrize("text", ["", "usb", "10:5GB/s", "10us:fast", "0us:5GB/s", "1us:"])
def test_links_that_cannot_be_read_are_named(text: str) -> None:
    with pytest.raises(MLXProviderError) as raised:
        link(text)
    assert raised.value.param == "link"


def test_a_link_takes_longer_for_more_ranks_and_bytes() -> None:
    for each in map(link, ("jaccl", "ring-thunderbolt", "ring-10gbe", "loopback", "1ms:1GB/s")):
        took = [each.collective(ranks, 4096) for ranks in (1, 2, 4, 8)]
        assert took[0] == 0
        assert took == sorted(took)
        assert each.collective(2, 2**20) > each.collective(2, 2**10)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[1]", "no JSON|JSON object"),
        ("{}", "can be described"),
        ('{"model_type": "nobody"}', "can be described"),
        (
            '{"model_type": "llama", "num_hidden_layers": 1000000000}',
            "num_hidden_layers is 1,000,000,000",
        ),
        (json.dumps(WIDE | {"num_key_value_heads": 7}), "7 key-value heads"),
        (json.dumps(WIDE | {"hidden_size": "wide"}), "can be described"),
    ],
)
def test_a_config_that_describes_no_model_is_refused(
    tmp_path: Path, content: str, told: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(MLXProviderError, match=told):
        planned(str(path), "--machines", "m4-max-64gb x2")


@pytest.mark.parametrize("model", ["/nowhere", "/nowhere/config.json", "./here"])
def test_a_model_that_is_not_there_is_named(model: str) -> None:
    with pytest.raises(MLXProviderError, match=model):
        planned(model, "--machines", "m4-max-64gb")
