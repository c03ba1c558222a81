"""Numbers of the operator that are no use: infinite, NaN, negative, too small, too large."""

import math

import pytest

from command_line import invoke
from mlx_provider.errors import BadRequest
from mlx_provider.families.checkpoint import sampling_defaults
from mlx_provider.litellm.model_info import operator_options
from mlx_provider.protocol.requests import GenerateRequest, ModelOptions
from mlx_provider.records import SamplingDefaults
from mlx_provider.settings import EngineSettings, engine_settings, parse_bytes

NUMBERS = "DISK_CACHE_BYTES IDLE_TIMEOUT MAX_CHUNK MAX_ROWS MEMORY_LIMIT STALL_TARGET".split()
ZERO_IS_NONE = {"DISK_CACHE_BYTES"}
"""What may be switched off."""


def setting(name: str, text: str) -> EngineSettings:
    return engine_settings({f"MLX_PROVIDER_{name}": text})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "-1", "1e400", "9" * 40, "many", "0x10"])
def test_a_variable_with_a_useless_number_is_refused_by_name(name, text):
    with pytest.raises(BadRequest, match=f"MLX_PROVIDER_{name}='.*' must be"):
        setting(name, text)


@pytest.mark.parametrize("name", NUMBERS)
def test_zero_is_accepted_only_for_settings_where_zero_has_a_meaning(name):
    if name in ZERO_IS_NONE:
        assert getattr(setting(name, "0"), name.lower()) == 0
    else:
        with pytest.raises(BadRequest, match="greater than or equal to"):
            setting(name, "0")


def test_usual_values_are_accepted_with_their_units_and_spaces():
    assert [*map(str, setting("MODEL_ROOTS", "/a: /b :").model_roots)] == ["/a", "/b"]
    assert setting("MEMORY_LIMIT", "12G").memory_limit == 12 * 2**30 == parse_bytes("12GiB")
    assert setting("IDLE_TIMEOUT", "0.5").idle_timeout == 0.5
    assert setting("STALL_TARGET", "0.25").stall_target == 0.25
    assert setting("MAX_CHUNK", "512").max_chunk == 512


def test_prefixes_are_kept_in_the_state_folder_unless_that_is_switched_off(tmp_path):
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    assert engine_settings(environ).disk_cache == tmp_path / "mlx-provider"
    assert engine_settings(environ).disk_cache_bytes is None
    assert setting("DISK_CACHE_BYTES", "0").disk_cache_bytes == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((n, v) for n in ("keep_alive",) for v in (math.inf, math.nan, 1e300, -2)),
        *(("context_length", v) for v in (0, -1, 10**30, math.inf)),
        *(("sparse_prefill", v) for v in (math.nan, 0, 2)),
    ],
)
def test_an_invalid_option_of_a_config_entry_is_refused_by_name(name, value):
    with pytest.raises(BadRequest, match=name):
        operator_options({"model_info": {"mlx": {name: value}}})
    if name in ModelOptions.model_fields:
        with pytest.raises(ValueError, match=name):
            ModelOptions(**{name: value})


@pytest.mark.parametrize("timeout", [math.inf, math.nan, 0, 1e300])
def test_a_timeout_that_is_not_finite_and_positive_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout"):
        GenerateRequest(model="m", prompt="x", timeout=timeout)


@pytest.mark.parametrize("value", ["hot", math.nan, math.inf, -1, 10**9, [1], True])
def test_an_invalid_sampling_default_of_a_file_is_ignored(value):
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    assert sampling_defaults(dict.fromkeys(names, value)) in (
        SamplingDefaults(None, None, None, None, None),
        SamplingDefaults(1.0, None, -1, None, None),
    )


@pytest.mark.parametrize(
    ("command", "option"), [("serve", "--drain"), ("top", "--every"), ("engine logs", "--lines")]
)
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_an_invalid_number_for_a_command_option_is_refused_by_name(command, option, value):
    result = invoke(*command.split(), option, value)
    assert result.exit_code == 2
    assert option in result.stderr
