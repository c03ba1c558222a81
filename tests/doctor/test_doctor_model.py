"""Checks of a model: its files, plugin, memory, template and head, red and green."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_provider.commands import context_in_memory
from mlx_provider.doctor import Finding, Subject, examine, machine, model
from mlx_provider.serving import hub
from mlx_provider.serving.hub import Outline

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


def test_a_complete_model_has_no_complaint(whole: Path, subject: Make) -> None:
    found = of_model(subject(whole))
    assert {name for name, state in found.items() if state in ("warn", "fail")} == set()
    assert found["model.files"] == found["model.memory"] == found["template.messages"] == "ok"
    assert found["template.round_trip"] == "ok"


def test_a_missing_model_fails_without_a_template_check(subject: Make, tmp_path: Path) -> None:
    nowhere = of_model(subject(tmp_path / "nothing"))
    assert nowhere["model.found"] == "fail"
    (tmp_path / "empty").mkdir()
    empty = of_model(subject(tmp_path / "empty"))
    assert empty["model.found"] == "fail"
    assert not any(name.startswith("template.") for name in {**nowhere, **empty})


def test_the_size_of_a_model_that_only_the_hub_has_is_reported_before_a_download(
    whole: Path, subject: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_broken_or_missing_weights_are_reported_with_the_file(folder: Path, subject: Make) -> None:
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


def test_a_broken_config_or_tokenizer_is_a_failed_finding(folder: Path, subject: Make) -> None:
    (folder / "tokenizer.json").unlink()
    assert of_model(subject(folder))["model.formats"] == "fail"
    (folder / "config.json").write_text("{")
    found = of_model(subject(folder))
    assert found["model.family"] == "fail"
    assert "model.memory" not in found
    assert found["versions.mlx"] == "ok"


def test_a_model_that_no_family_serves_is_a_failed_finding(folder: Path, subject: Make) -> None:
    edit(folder, "config.json", model_type="nobodys_model")
    assert of_model(subject(folder))["model.family"] == "fail"


@pytest.mark.parametrize(("limit", "expected"), [("100K", "fail"), ("4M", "warn"), ("10G", "ok")])
def test_memory_finding_obeys_limit_and_is_that_of_launch(
    limit: str, expected: str, whole: Path, subject: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_PROVIDER_MEMORY_LIMIT", limit)
    [told] = model.check_memory(subject(whole, environ={"MLX_PROVIDER_MEMORY_LIMIT": limit}))
    assert told.state == expected
    tokens = context_in_memory(str(whole), 32_768)
    assert (f" {tokens:,} tokens fits" in told.what) == (tokens > 0)


def test_memory_of_a_token_and_a_short_context_are_reported(folder: Path, subject: Make) -> None:
    edit(folder, "config.json", max_position_embeddings=4096)
    [told] = model.check_memory(subject(folder))
    assert told.state == "note"
    assert "bytes per token" in told.what
    assert "coding agents need 32,768" in told.what


def test_unknown_and_unlimited_caches_are_no_faults(folder: Path, subject: Make) -> None:
    for unknown in ("of_a_plugin_alone", "../..", "__pycache__", "base"):
        edit(folder, "config.json", model_type=unknown)
        [told] = model.check_memory(subject(folder))
        assert (told.state, "plugin of its family" in told.what) == ("note", True)
    mamba = {"state_size": 4, "conv_kernel": 4, "time_step_rank": 2, "use_conv_bias": True}
    unlimited = {"model_type": "mamba", "max_position_embeddings": None}
    edit(folder, "config.json", **unlimited, **mamba, use_bias=False)
    [told] = model.check_memory(subject(folder))
    assert (told.state, told.what.endswith("a context of any length fits")) == ("ok", True)


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
def test_the_findings_of_a_chat_template_name_its_faults(
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


def test_a_template_without_a_known_tool_format_is_a_warning(folder: Path, subject: Make) -> None:
    edit(folder, "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    assert of_model(subject(folder))["model.tool_parser"] == "warn"


def test_a_broken_plugin_is_a_finding_with_a_remedy(subject: Make, install_plugin: Install) -> None:
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


# -- heads


def test_a_draft_head_without_weights_is_a_warning(folder: Path, subject: Make) -> None:
    def head(here: Subject) -> Finding:
        return next(iter(model.check_draft_head(here)))

    assert head(subject(folder)).state == "ok"
    edit(folder, "config.json", mtp_num_hidden_layers=1)
    assert head(subject(folder)).state == "warn"
    assert head(subject("demo-hybrid")).what.endswith("has a head for drafts")
    # layers beyond those of the model are a head, too
    edit(folder, "config.json", num_hidden_layers=1, num_nextn_predict_layers=1)
    assert head(subject(folder)).what.endswith("has a head for drafts")


def test_a_draft_head_is_found_by_text_tensors_only() -> None:
    body = ["model.layers.0.mlp.weight", "visual.mtp.weight", "visual.layers.9.weight"]
    assert not model.has_head(body, 1)
    assert model.has_head([*body, "mtp.fc.weight"], 1)
    assert model.has_head([*body, "model.layers.1.mlp.weight"], 1)
    assert not model.has_head([*body, "model.layers.1.mlp.weight"], 2)
