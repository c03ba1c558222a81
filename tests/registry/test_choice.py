"""Which record is used where several could be."""

from collections.abc import Callable

import pytest

from mlx_provider.errors import UnsupportedModel
from named_plugins import discover

Install = Callable[..., str]

FAMILY = """
from mlx_provider import ModelFamily, hookimpl

@hookimpl
def mlx_model_families():
    yield ModelFamily({name!r}, lambda config: {matches}, str)
"""

PARSERS = """
from mlx_provider import ReasoningParser, ToolParser, hookimpl

@hookimpl
def mlx_tool_parsers():
    for name in {names!r}:
        yield ToolParser(
            name,
            "<",
            ">",
            lambda text, tools: [],
            lambda template: {detects},
            rank={rank},
            aliases=(name + "_alias", "json"),
        )

@hookimpl
def mlx_reasoning_parsers():
    for name in {names!r}:
        yield ReasoningParser(name, "<", ">", lambda template: {detects}, rank={rank})
"""


def family(name: str, matches: str) -> str:
    return FAMILY.format(name=name, matches=matches)


def parsers(*names: str, detects: str = "True", rank: int = 0) -> str:
    return PARSERS.format(names=names, detects=detects, rank=rank)


def test_the_family_with_the_highest_priority_serves_the_model(install_plugin: Install) -> None:
    text = install_plugin("mlx-provider", family("text", "1"), name="text")
    gemma = install_plugin(
        "mlx-provider", family("gemma", "10 * ('gemma' in config['model_type'])"), name="gemma"
    )
    registry = discover(text, gemma)
    found, plugin = registry.family_for({"model_type": "gemma3"})
    assert (found.name, plugin.name) == ("gemma", "gemma")
    assert registry.family_for({"model_type": "llama"})[0].name == "text"


def test_a_third_party_family_wins_a_tie_but_no_higher_priority(install_plugin: Install) -> None:
    ours = install_plugin("mlx-provider", family("a", "10"), name="a")
    tie = install_plugin("mlx-provider-tie", family("tie", "10"))
    low = install_plugin("mlx-provider-low", family("low", "9"))
    assert discover(ours, low).family_for({})[0].name == "a"
    assert discover(ours, low, tie).family_for({})[0].name == "tie"


def test_a_third_party_family_replaces_a_built_in_one_and_is_logged(
    install_plugin: Install, caplog: pytest.LogCaptureFixture
) -> None:
    ours = install_plugin("mlx-provider", family("gemma", "10"), name="gemma")
    theirs = install_plugin("mlx-provider-better", family("gemma", "5"), version="2.1")
    registry = discover(ours, theirs)
    said = "model family 'gemma' is replaced by mlx_provider_better (mlx-provider-better 2.1)"
    assert registry.plugins[0].notes == (said,)
    assert said in caplog.text
    assert registry.family_for({})[1].name == theirs
    assert list(registry.model_families) == ["gemma"]


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        pytest.param(family("x", "1"), "model family", id="family"),
        pytest.param(parsers("x"), "tool parser", id="parser"),
    ],
)
def test_a_name_claimed_by_two_third_parties_is_an_error_naming_both(
    install_plugin: Install, source: str, kind: str
) -> None:
    a = install_plugin("mlx-provider-a", source)
    b = install_plugin("mlx-provider-b", source)
    registry = discover(a, b)
    assert registry.plugins[0].error is None
    assert registry.plugins[1].error == (
        f"PluginError: {kind} 'x' is claimed by mlx_provider_a (mlx-provider-a 1.0) and by "
        "mlx_provider_b (mlx-provider-b 1.0); that of mlx_provider_a (mlx-provider-a 1.0) is used"
    )


def test_the_first_of_two_third_party_families_is_used(install_plugin: Install) -> None:
    ours = install_plugin("mlx-provider", family("ours", "10"), name="ours")
    first = install_plugin("aaa", family("first", "10"))
    second = install_plugin("bbb", family("second", "10"))
    registry = discover(ours, first, second)
    assert registry.family_for({"model_type": "toy"})[0].name == "first"


def test_a_replaced_name_cannot_be_claimed_by_another_third_party(install_plugin: Install) -> None:
    names = [
        install_plugin("mlx-provider", family("x", "1"), name="x"),
        install_plugin("mlx-provider-a", family("x", "1")),
        install_plugin("mlx-provider-b", family("x", "1")),
    ]
    registry = discover(*names)
    assert [plugin.error is None for plugin in registry.plugins] == [True, True, False]


def test_an_unsupported_model_names_what_would_help(install_plugin: Install) -> None:
    names = [
        install_plugin("mlx-provider-toy", family("toy", "0")),
        install_plugin("mlx-provider-broken", "import nowhere_to_be_found"),
    ]
    with pytest.raises(UnsupportedModel) as caught:
        discover(*names).family_for({"model_type": "mamba9"})
    assert caught.value.message == (
        "no installed model family serves model_type 'mamba9' (installed: toy); "
        "a plugin can add one with the hook mlx_model_families; "
        "plugins that failed to load: mlx_provider_broken"
    )


@pytest.mark.parametrize("matches", ["config['no such key']", "None", "'high'"])
def test_a_family_whose_match_fails_is_not_used(install_plugin: Install, matches: str) -> None:
    names = [
        install_plugin("mlx-provider", family("text", "1"), name="text"),
        install_plugin("mlx-provider-toy", family("toy", matches)),
    ]
    registry = discover(*names)
    assert registry.family_for({"model_type": "x"})[0].name == "text"
    assert registry.family_for({"model_type": "x"})[0].name == "text"
    (note,) = registry.plugins[1].notes
    assert note.startswith("model family 'toy': matches failed: ")


def test_parsers_are_found_by_name_and_by_template(install_plugin: Install) -> None:
    ours = parsers("hermes", "json", detects="'tools' in template")
    registry = discover(install_plugin("mlx-provider", ours, name="parsers"))
    assert registry.plugins[0].records["reasoning parser"] == ("hermes", "json")
    tool_parser = registry.detect_tool_parser("{{ tools }}")
    reasoning_parser = registry.detect_reasoning_parser("{{ tools }}")
    assert (tool_parser.name, reasoning_parser.name) == ("hermes", "hermes")
    assert registry.detect_tool_parser("plain") is None
    assert registry.detect_reasoning_parser("plain") is None


def test_a_parser_is_found_by_its_aliases_after_all_names(install_plugin: Install) -> None:
    name = install_plugin("mlx-provider", parsers("hermes", "json"), name="parsers")
    registry = discover(name)
    names = ("hermes", "json", "hermes_alias", "json_alias")
    found = [registry.tool_parser(name).name for name in names]
    assert found == ["hermes", "json", "hermes", "json"]
    assert registry.plugins[0].records["tool parser"] == ("hermes", "json")


FALLBACKS = """
from mlx_provider import ToolParser, hookimpl

@hookimpl
def mlx_tool_parsers():
    for name, part, rank in {parsers!r}:
        yield ToolParser(name, "<", ">", fallback=part, rank=rank)
"""


def test_the_fallback_parser_of_the_highest_rank_is_used(install_plugin: Install) -> None:
    ours = [("a", "", 9), ("b", "read", 0), ("c", "write", 1), ("d", "write", 0)]
    theirs = [("e", "read", 0), ("f", "write", 0)]
    names = [
        install_plugin("mlx-provider", FALLBACKS.format(parsers=ours), name="ours"),
        install_plugin("mlx-provider-x", FALLBACKS.format(parsers=theirs)),
    ]
    for registry, wanted in ((discover(names[0]), ["b", "c"]), (discover(*names), ["e", "c"])):
        assert [registry.fallback_tool_parser(part).name for part in ("read", "write")] == wanted
    none = discover(install_plugin("mlx-provider-y", family("y", "1")))
    assert none.fallback_tool_parser("read") is None


@pytest.mark.parametrize(("rank", "found"), [(0, "z"), (1, "a")])
def test_the_parser_of_the_highest_rank_is_detected_or_a_third_partys(
    install_plugin: Install, rank: int, found: str
) -> None:
    ours = install_plugin("mlx-provider", parsers("a", rank=rank), name="ours")
    theirs = install_plugin("zzz", parsers("z"))
    assert discover(ours, theirs).detect_tool_parser("x").name == found


def test_a_failed_detect_is_noted_and_the_next_parser_is_tried(install_plugin: Install) -> None:
    ours = install_plugin("mlx-provider", parsers("a"), name="ours")
    theirs = install_plugin("zzz", parsers("z", detects="1 / 0"))
    registry = discover(ours, theirs)
    assert registry.detect_reasoning_parser("x").name == "a"
    assert registry.plugins[1].notes == (
        "reasoning parser 'z': detect failed: ZeroDivisionError: division by zero "
        "(zzz.py, line 20, in mlx_reasoning_parsers.<lambda>)",
    )


def test_a_parser_name_is_found_in_any_spelling(install_plugin: Install) -> None:
    registry = discover(install_plugin("mlx-provider", parsers("my_format2.5"), name="ours"))
    for spelling in ("my_format2.5", "My-Format-25", "myformat25", "MY_FORMAT2_5_ALIAS"):
        assert registry.tool_parser(spelling).name == "my_format2.5"


def test_a_third_party_parser_replaces_ours_in_any_spelling(install_plugin: Install) -> None:
    ours = install_plugin("mlx-provider", parsers("one_two"), name="ours")
    theirs = install_plugin("zzz", parsers("One-Two"))
    registry = discover(ours, theirs)
    assert registry.tool_parser("one_two").name == "One-Two"


def test_an_alias_claimed_by_two_third_parties_is_an_error(install_plugin: Install) -> None:
    names = [install_plugin(name, parsers(name)) for name in ("aaa", "zzz")]
    first, second = discover(*names).plugins
    assert first.error is None
    assert second.error is not None
    assert "tool parser 'json' is claimed by" in second.error


def test_a_parser_name_precedes_an_alias(install_plugin: Install) -> None:
    ours = install_plugin("mlx-provider", parsers("json"), name="ours")
    theirs = install_plugin("zzz", parsers("other"))
    assert discover(ours, theirs).tool_parser("json").name == "json"


@pytest.mark.parametrize("fault", ["aliases=['a']", "first=(1,)", "end=None", "starts='x'"])
def test_a_parser_with_invalid_markers_is_an_error(install_plugin: Install, fault: str) -> None:
    source = PARSERS.format(names=("bad",), detects="True", rank=0)
    source = source.replace(
        '            aliases=(name + "_alias", "json"),\n', f"            {fault},\n"
    )
    if fault.startswith("end"):
        source = source.replace('            ">",\n', "", 1).replace(
            "lambda text", "parse=lambda text", 1
        )
        source = source.replace("lambda template", "detect=lambda template", 1)
    (plugin,) = discover(install_plugin("zzz", source)).plugins
    assert plugin.error is not None
    assert f"ToolParser 'bad': {fault.partition('=')[0]} is not" in plugin.error
