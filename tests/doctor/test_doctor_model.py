"""Checks of a model: its files, plugin, memory, template and head, red and green."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_provider.doctor import Finding, Subject, examine, machine, model
from mlx_provider.engine.execution.pass_memory import PassBytes
from mlx_provider.engine.execution.probe import Probe
from mlx_provider.engine.memory import MemoryProfile
from mlx_provider.engine.scheduling.costs import Curve
from mlx_provider.serving import hub
from mlx_provider.serving.hub import Outline
from mlx_provider.serving.measurements import Measured, Measurements, software

Make = Callable[..., Subject]
Install = Callable[..., str]

CHATML = """
{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or "" }}
{%- for call in m.tool_calls or [] %}
<tool_call>
CALL
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALL = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
GOOD = CHATML.replace("CALL", CALL)
ALTERNATES = """
{%- set ns = namespace(at=0) %}
{%- for m in messages if m.role in ("user", "assistant") and not m.tool_calls %}
{%- if (m.role == "user") != (ns.at % 2 == 0) %}{{ raise_exception("no") }}{% endif %}
{%- set ns.at = ns.at + 1 %}
{%- endfor %}"""


def states(findings: list[Finding]) -> dict[str, str]:
    """By name, the worst where there are several."""
    found: dict[str, str] = {}
    order = ["ok", "note", "warn", "fail"]
    for each in findings:
        found[each.name] = max(found.get(each.name, "ok"), each.state, key=order.index)
    return found


def of_model(subject: Subject) -> dict[str, str]:
    return states(examine(subject, thorough=False))


def edit(folder: Path, name: str, **values: object) -> None:
    path = folder / name
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_a_whole_model_has_no_complaint(whole: Path, subject: Make) -> None:
    found = of_model(subject(whole))
    assert {name for name, state in found.items() if state in ("warn", "fail")} == set()
    assert found["model.files"] == found["model.memory"] == found["template.messages"] == "ok"
    assert found["template.round_trip"] == "ok"


def test_a_model_that_is_not_there(subject: Make, tmp_path: Path) -> None:
    nowhere = of_model(subject(tmp_path / "nothing"))
    assert nowhere["model.found"] == "fail"
    (tmp_path / "empty").mkdir()
    empty = of_model(subject(tmp_path / "empty"))
    assert empty["model.found"] == "fail"
    assert not any(name.startswith("template.") for name in {**nowhere, **empty})


def test_a_model_that_the_hub_alone_has(
    whole: Path, subject: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it takes is told before a download, of which there is none."""
    config = json.loads((whole / "config.json").read_text())
    asked: list[str] = []

    def outline(model: str) -> Outline:
        asked.append(model)
        return Outline(config, 30 * 10**9)

    monkeypatch.setattr(hub, "outline", outline)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: SimpleNamespace(free=10**9))
    environ = {"MLX_PROVIDER_MEMORY_LIMIT": "24G"}
    found = of_model(subject("maker/away", environ=environ))
    assert asked == ["maker/away"]
    assert (found["model.found"], found["model.family"]) == ("note", "ok")
    assert (found["disk.models"], found["model.memory"]) == ("fail", "fail")
    assert not any(name.startswith(("template.", "speculation.")) for name in found)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: SimpleNamespace(free=10**12))
    found = of_model(subject("maker/away", environ={"MLX_PROVIDER_MEMORY_LIMIT": "48G"}))
    assert found["disk.models"] == found["model.memory"] == "ok"


def test_broken_weights(folder: Path, subject: Make) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for broken, told in (
        (whole[:-100], "cut short by 100 bytes"),
        (b"<html>not found</html>", "no safetensors"),
        (None, "no weights"),
    ):
        weights.unlink() if broken is None else weights.write_bytes(broken)
        found = examine(subject(folder), thorough=False)
        assert states(found)["model.files"] == "fail"
        assert any(told in each.what for each in found), told
    weights.write_bytes(whole)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = examine(subject(folder), thorough=False)
    assert any("model-00002.safetensors is missing" in each.what for each in found)


def test_a_broken_config_and_tokenizer(folder: Path, subject: Make) -> None:
    (folder / "tokenizer.json").unlink()
    assert of_model(subject(folder))["model.formats"] == "fail"
    (folder / "config.json").write_text("{")
    found = of_model(subject(folder))
    assert found["model.family"] == "fail"
    assert "model.memory" not in found
    assert found["versions.mlx"] == "ok"


def test_no_family(folder: Path, subject: Make) -> None:
    edit(folder, "config.json", model_type="nobodys_model")
    assert of_model(subject(folder))["model.family"] == "fail"


@pytest.mark.parametrize(("limit", "expected"), [("100K", "fail"), ("4M", "warn"), ("10G", "ok")])
def test_memory(limit: str, expected: str, whole: Path, subject: Make) -> None:
    here = subject(whole, environ={"MLX_PROVIDER_MEMORY_LIMIT": limit})
    assert of_model(here)["model.memory"] == expected


def test_memory_of_a_token_and_a_short_context_are_reported(folder: Path, subject: Make) -> None:
    edit(folder, "config.json", max_position_embeddings=4096)
    [told] = model.memory(subject(folder))
    assert told.state == "note"
    assert "bytes per token" in told.what
    assert "coding agents need 32,768" in told.what


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (GOOD, {}),
        ("{{ raise_exception('never') }}", {"template.messages": "fail"}),
        ("{{ messages[0].role }}", {"template.messages": "fail", "template.tools": "warn"}),
        # each turn is written anew from its end
        (GOOD.replace("in messages", "in messages | reverse"), {"template.messages": "warn"}),
        # no tools are shown, no calls, no results: they are written as text
        (GOOD.replace("if tools", "if false"), {"template.tools": "warn"}),
        (
            GOOD.replace("m in messages", "m in messages if m.role != 'tool'"),
            {"template.messages": "ok", "template.tools": "warn"},
        ),
        # it has no place for text beside calls: alone it would break the turns
        (
            ALTERNATES
            + GOOD.replace('m.content or ""', '(m.content or "") if not m.tool_calls else ""'),
            {"template.messages": "ok", "template.tools": "warn"},
        ),
        # nothing is rendered without end
        ("{{ messages[0].content * 1000000000 }}", {"template.messages": "fail"}),
        # calls in a form that its own parser does not read
        (GOOD.replace('"arguments": {{', '"arguments" = {{'), {"template.round_trip": "fail"}),
        # it writes thoughts that nobody reads
        (
            GOOD.replace('{{ m.content or "" }}', "[{{ m.reasoning_content }}] {{ m.content }}"),
            {"model.reasoning_parser": "warn"},
        ),
        (None, {"model.formats": "fail"}),
    ],
)
def test_templates(
    template: str | None, expected: dict[str, str], folder: Path, subject: Make
) -> None:
    edit(folder, "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    found = of_model(subject(folder))
    assert expected.items() <= found.items(), found
    named = {name for name in found if name.startswith("template.")}
    if not expected:
        assert {found[name] for name in named} == {"ok"}


def test_an_unknown_tool_format(folder: Path, subject: Make) -> None:
    edit(folder, "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    assert of_model(subject(folder))["model.tool_parser"] == "warn"


def test_a_broken_plugin(subject: Make, install_plugin: Install) -> None:
    broken = install_plugin("broken", "import nowhere_to_be_found")
    named = {"MLX_PROVIDER_PLUGINS": f"text,{broken},typo"}
    found = examine(subject(environ=named), thorough=False)
    told = states(found)
    assert (told[f"plugins.{broken}"], told["plugins.typo"]) == ("fail", "fail")
    assert told["plugins.working"] == "ok"
    remedies = {each.name: each.remedy for each in found}
    assert "pip uninstall broken" in remedies[f"plugins.{broken}"]
    none = states(examine(subject(environ={"MLX_PROVIDER_PLUGINS": ""}), thorough=False))
    assert none["plugins.working"] == "fail"


# -- heads and what was measured


def kept(folder: Path, seconds: list[tuple[int, float]], **fields: object) -> Measured:
    values: dict[str, object] = {"drafts": True, "noise_floor": 0.25, **fields}
    probe = Probe("grouped", MemoryProfile(0, 8), ("a note",), mixes=True, **values)  # type: ignore[arg-type]
    return Measured(probe, Curve(seconds), PassBytes(), str(folder.resolve()), "", software())


def with_kept(here: Subject, *measured: Measured) -> Subject:
    store = Measurements.chosen("auto", here.environ)
    for number, each in enumerate(measured):
        store.keep(str(number), each)
    return here


def test_heads(folder: Path, subject: Make) -> None:
    def head(here: Subject) -> Finding:
        return next(iter(model.gain(here)))

    assert head(subject(folder)).state == "ok"
    edit(folder, "config.json", mtp_num_hidden_layers=1)
    assert head(subject(folder)).state == "warn"
    assert head(subject("demo-hybrid")).what.endswith("has a head for drafts")
    # layers beyond those of the model are a head, too
    edit(folder, "config.json", num_hidden_layers=2, num_nextn_predict_layers=1)
    assert head(subject(folder)).what.endswith("has a head for drafts")


def test_the_gain_of_drafts_is_estimated_from_measurements(whole: Path, subject: Make) -> None:
    here = subject(whole)
    assert [each.name for each in model.gain(here)] == ["speculation.head"]
    flat = kept(whole, [(1, 0.010), (2, 0.0101), (4, 0.0102), (8, 0.0105)])
    (_, gains) = model.gain(with_kept(here, flat))
    assert "7 to a pass, make a single stream" in gains.what
    assert "70%" in gains.what
    steep = kept(whole, [(1, 0.010), (2, 0.020), (4, 0.040), (8, 0.080)])
    (_, loses) = model.gain(with_kept(here, flat, steep))
    assert "do not pay" in loses.what
    apart = kept(whole, [(1, 0.01)], drafts=False)
    (_, none) = model.gain(with_kept(here, flat, steep, apart))
    assert none.state == "note"


def test_the_gain_is_that_of_the_policy() -> None:
    curve = Curve([(1, 0.010), (2, 0.0105), (4, 0.0110), (8, 0.030)])
    measured = Measured(Probe("grouped", MemoryProfile(0, 8), (), drafts=True), curve)
    told = model.gain_text(measured, 0.1)
    # 1 + 0.7 + 0.49 + 0.343 tokens in the time of a pass of four and of three guesses
    assert f"{2.533 * 0.010 / (0.0110 + 3 * 0.001):.2f} times as fast" in told
    assert "3 to a pass" in told
    assert "do not pay" in model.gain_text(measured, 0.9)


def test_a_draft_reads_the_head_and_the_output_matrix_once_more() -> None:
    """Of all that a token of text passes through."""
    cost = model.cost_of_a_draft
    body = {"model.layers.0.mlp.weight": 60, "model.norm.weight": 0, "visual.merger.weight": 999}
    tied = {**body, "model.embed_tokens.weight": 40}
    assert cost(tied, 1) is None
    head = {"mtp.fc.weight": 4, "mtp.layers.0.mlp.weight": 6}
    assert cost({**tied, **head}, 1) == 0.5
    untied = {**tied, "lm_head.weight": 40}
    assert cost({**untied, **head}, 1) == 0.5
    behind = {**untied, "model.layers.1.mlp.weight": 10}
    assert cost(behind, 1) == 0.5
    assert cost(behind, 2) is None


def test_what_was_measured(whole: Path, subject: Make) -> None:
    here = subject(whole)
    assert states(list(model.decoding(here))) == {"measured.decoding": "note"}
    with_kept(here, kept(whole, [(1, 0.01)]))
    found = list(model.decoding(here))
    assert "in one pass" in found[0].what
    assert "0.25" in found[0].what
    assert [each.name for each in found[1:]] == ["measured.prompts"]
    # a token takes 10 ms: 16 of the prompt beside the streams' 4, then steps of these alone
    assert found[1].what == (
        "while a prompt of 16,000 tokens is computed, 4 running streams get a token every 0.1 s "
        "(otherwise 0.04 s, at most 0.19 s), and the prompt is computed at 64% of its full speed; "
        "MLX_PROVIDER_STALL_TARGET=0.1 sets the balance"
    )
    other = Measured(kept(whole, [(1, 9.0)]).probe, Curve([(1, 9.0)]), None, str(whole), "4 bits")
    assert model.last_measured(with_kept(here, kept(whole, [(1, 0.01)]), other)) != other
    old = replace(kept(whole, [(1, 0.01)]), software="mlx-provider 0.0.1")
    (told, *_) = model.decoding(with_kept(here, old))
    assert "0.0.1, and again at the next load" in told.what
