"""What is compared, as it was written on the command line."""

from pathlib import Path

import pytest

from mlx_provider import BadRequest, ModelNotFound
from mlx_provider.errors import MLXProviderError
from mlx_provider.registry import PluginRegistry
from mlx_provider_eval.subjects import Subject, _config, check_subjects, make_subjects

NO_YAML = ("a: [", "2026-13-45", "!!int x", "!!bool x", "!!timestamp x")


def test_an_option_with_several_values_makes_a_subject_for_each_value() -> None:
    options = ["kv_bits=default", "kv_bits=8", "reproducible=true"]
    one, other = make_subjects(["demo"], options)
    assert one.options == {"reproducible": True}
    assert other.options == {"kv_bits": 8, "reproducible": True}
    assert [one.label, other.label] == ["demo, kv_bits=default", "demo, kv_bits=8"]


def test_every_model_is_combined_with_every_option_value(tmp_path: Path) -> None:
    models = ["mlx/demo", str(tmp_path), "demo", f"{tmp_path}/"]
    found = make_subjects(models, ["kv_bits=4", "kv_bits=8", "dtype=auto"])
    assert len(found) == 4
    assert found[0] == Subject("demo", {"kv_bits": 4, "dtype": "auto"}, "demo, kv_bits=4")
    assert found[-1].model == str(tmp_path)
    assert found[-1].label == f"{tmp_path.name}, kv_bits=8"


def test_options_are_those_of_a_config_in_json_types() -> None:
    (found,) = make_subjects(["demo"], ["drafter=off", "extra={at: 2024-01-01}"])
    assert found.options == {"drafter": "off", "extra": {"at": "2024-01-01"}}


def test_model_folders_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "draft").mkdir()
    monkeypatch.chdir(tmp_path)
    (found,) = make_subjects(["demo"], ["draft_model=draft"])
    assert found.options == {"draft_model": str(tmp_path / "draft")}


@pytest.mark.parametrize(
    ("written", "told"),
    [
        *((word, f"--option {word}: write name=value") for word in ("kv_bits", "=8", "adapter=")),
        ("kv_bits=3", "--option kv_bits: Input should be 4 or 8"),
        ("kvbits=8", "--option kvbits: no such option; there are adapter"),
        *((f"context_length={text}", "--option context_length: Input") for text in NO_YAML),
    ],
)
def test_a_wrong_eval_option_is_refused_by_name(written: str, told: str) -> None:
    with pytest.raises(BadRequest) as error:
        make_subjects(["demo"], [written])
    assert error.value.message.startswith(told)


@pytest.mark.parametrize(
    ("subject", "error", "told"),
    [
        (Subject("nobody/has-this"), ModelNotFound, "nobody/has-this is not on this machine"),
        (Subject("demo", {"tool_parser": "x"}), MLXProviderError, "no tool parser 'x'"),
    ],
)
def test_a_subject_that_cannot_be_served_is_refused_before_anything_starts(
    subject: Subject, error: type[MLXProviderError], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(error, match=told):
        check_subjects([subject], PluginRegistry.discover())


def test_subjects_do_not_share_cached_prefixes() -> None:
    members = make_subjects(["demo"], ["sparse_prefill=default", "sparse_prefill=0.5"])
    infos = [entry["model_info"]["mlx"] for entry in _config(members)["model_list"]]
    assert len({info["cache_salt"] for info in infos}) == 2
    assert [info.get("sparse_prefill") for info in infos] == [None, 0.5]
