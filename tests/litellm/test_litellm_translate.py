"""OpenAI parameters, as LiteLLM delivers them, to the engine's request."""

import pytest
import yaml

from mlx_provider.errors import BadRequest
from mlx_provider.litellm.call import PROMPTS, Call, generate_requests
from mlx_provider.litellm.model_info import sign

HI = [{"role": "user", "content": "hi"}]


def requests(litellm_params=None, messages=HI, timeout=None, model_name="m", **params):
    return generate_requests(
        Call(
            {
                "model": model_name,
                "messages": messages,
                "optional_params": params,
                "litellm_params": litellm_params or {},
                "logging_obj": None,
                "timeout": timeout,
            }
        )
    )


def request(**given):
    (made,) = requests(**given)
    return made


def refusal(**params):
    with pytest.raises(BadRequest) as caught:
        request(**params)
    return caught.value


def test_missing_parameters_leave_the_defaults_to_the_model():
    made = request(temperature=None)
    assert made.sampling.temperature is None
    assert made.max_tokens is None
    assert made.messages == HI
    assert made.prompt is None


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": 2.1}, "temperature: must be at least 0 and at most 2, got 2.1"),
        ({"temperature": "hot"}, "temperature: "),
        ({"top_p": 1.5}, "top_p: must be at least 0 and at most 1, got 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty: must be above 0 and at most 100, got 0"),
        ({"presence_penalty": 3}, "presence_penalty: must be at least -2 and at most 2, got 3"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1, got 0"),
        ({"n": 0}, "n: must be at least 1 and at most 128, got 0"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"top_logprobs": 30, "logprobs": True}, "top_logprobs: must be at least 0 and at most 20"),
        ({"logprobs": 3}, "logprobs must be true or false, got 3"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"tools": "none"}, "tools must be a list"),
        ({"modalities": ["audio"]}, "modalities=['audio'] is not supported"),
        ({"messages": ["hi"]}, "messages.0: "),
        ({"extra_body": 3}, "extra_body must be an object"),
        ({"timeout": 0}, "timeout must be a number of seconds above 0"),
    ],
)
def test_an_invalid_value_is_refused_with_its_parameter_in_a_short_message(params, words):
    error = refusal(**params)
    assert words in error.message
    assert len(error.message) < 300


def test_a_prefix_mark_decides_whether_the_last_assistant_message_continues():
    said = {"role": "assistant", "content": "Sure:"}
    claude = {"metadata": {"user_api_key_request_route": "/v1/messages"}}
    for more, params, goes_on in [
        ({}, {}, False),
        ({"prefix": True}, {}, True),
        ({"prefix": False}, {}, False),
        ({}, claude, True),
        ({"prefix": False}, claude, True),
    ]:
        made = request(messages=[*HI, said | more], litellm_params=params)
        assert (made.messages, made.continues) == ([*HI, said], goes_on)


def test_unknown_parameters_are_refused_by_name():
    error = refusal(temprature=1, length_penalty=2)
    assert error.message == "unknown parameter: length_penalty, temprature"
    assert error.param == "length_penalty"


def test_parameters_without_meaning_are_accepted_without_a_warning():
    made = request(
        stream=True, stream_options={}, max_retries=2, user="u", store=False, service_tier="auto"
    )
    assert made.ignored == []


def test_ineffective_parameters_are_listed_as_ignored():
    made = request(web_search_options={}, prediction={"type": "content"}, store=True)
    assert sorted(made.ignored) == ["prediction", "store", "web_search_options"]


def test_fields_of_extra_body_are_merged_into_the_request():
    given = {"top_k": 3, "min_tokens": 2, "drafts": False, "sparse_prefill": False}
    made = request(extra_body=given, top_p=0.5)
    assert (made.sampling.top_k, made.sampling.top_p, made.min_tokens) == (3, 0.5, 2)
    assert not made.drafts
    assert not made.sparse_prefill


def test_stop_strings_and_stop_tokens_are_read_in_every_spelling():
    assert request(stop="a").stop == ["a"]
    assert request(stop=["a", "b"]).stop == ["a", "b"]
    assert request(mlx_stop=list("abcdef")).stop == list("abcdef")
    assert request(stop_token_ids=[1, 2]).stop_token_ids == [1, 2]


def test_max_completion_tokens_precedes_max_tokens():
    assert request(max_tokens=5, max_completion_tokens=7).max_tokens == 7


@pytest.mark.parametrize(
    ("params", "template", "budget"),
    [
        ({}, {}, None),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", "enable_thinking": True}, None),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}, None),
        (
            {"reasoning_effort": {"effort": "low", "summary": "auto"}},
            {"reasoning_effort": "low", "enable_thinking": True},
            None,
        ),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"enable_thinking": True}, 9),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}, None),
        ({"enable_thinking": False, "thinking_budget": 4}, {"enable_thinking": False}, 4),
        ({"verbosity": "low"}, {"verbosity": "low"}, None),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False, "x": 1}},
            {"enable_thinking": False, "x": 1},
            None,
        ),
    ],
)
def test_thinking_parameters_in_every_spelling_set_template_and_budget(params, template, budget):
    made = request(**params)
    assert made.template == template
    assert made.thinking_budget == budget


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("params", "field", "value"),
    [
        ({"response_format": {"type": "text"}}, "response_format", None),
        ({"response_format": {"type": "json_object"}}, "response_format", {"type": "json_object"}),
        ({"grammar": "start: x"}, "grammar", {"type": "lark", "value": "start: x"}),
        ({"grammar": {"type": "regex", "value": "b"}}, "grammar", {"type": "regex", "value": "b"}),
    ],
)
def test_a_constraint_parameter_sets_its_request_field(params, field, value):
    assert getattr(request(**params), field) == value


@pytest.mark.parametrize(
    "params",
    [
        {"grammar": "start: x", "response_format": {"type": "json_object"}},
        {"grammar": 3},
        {"grammar": {"type": "ebnf", "value": "x"}},
        {"response_format": "json"},
    ],
)
def test_a_contradictory_or_invalid_constraint_is_refused(params):
    assert refusal(**params).param in params


def completion(**params):
    return request(litellm_params={"text_completion": True}, **params)


def test_a_text_completion_becomes_a_raw_prompt():
    made = completion(messages=[{"role": "user", "content": "once"}])
    assert made.prompt == "once"
    assert made.messages is None
    assert made.max_tokens == 16
    assert completion(max_tokens=3).max_tokens == 3
    assert completion(max_completion_tokens=3).max_tokens == 3
    assert completion(**{PROMPTS: [[1, 2]]}).prompt == [1, 2]
    made = completion(logprobs=2)
    assert (made.logprobs, made.top_logprobs, made.echo) == (True, 2, False)
    assert completion(echo=True).echo is True


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"echo": "yes"}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"messages": HI * 129}, "prompt"),
        ({"messages": HI * 65, "n": 2}, "prompt"),
        ({"tools": []}, "tools"),
    ],
)
def test_an_unsupported_text_completion_parameter_is_refused_by_name(params, name):
    with pytest.raises(BadRequest) as caught:
        completion(**params)
    assert caught.value.param == name


def test_text_completion_defaults_of_clients_pass():
    made = completion(echo=False, suffix="", best_of=2, n=2)
    assert made.n == 2


def test_the_session_is_the_litellm_session_id_else_the_cache_key():
    assert request(prompt_cache_key="k").session == "k"
    assert request(litellm_params={"litellm_session_id": "s"}, prompt_cache_key="k").session == "s"


def test_operator_options_come_from_model_info_alone():
    given = {"id": "x", "mlx": yaml.safe_load("{drafter: off}"), "mlx_context_length": 99}
    made = request(litellm_params={"model_info": given})
    assert (made.options.drafter, made.options.context_length) == ("off", 99)
    assert "unknown parameter: kv_bits" in refusal(kv_bits=8).message
    error = refusal(litellm_params={"model_info": {"mlx": {"kv_bits": 3}}})
    assert error.param == "model_info.mlx.kv_bits"
    assert refusal(litellm_params={"model_info": {"mlx_adaptor": "x"}}).param == (
        "model_info.mlx.adaptor"
    )


@pytest.mark.parametrize(
    ("salt", "metadata", "expected"),
    [
        (None, {"user_api_key_hash": "k1"}, "key:k1"),
        (None, {}, None),
        ("all", {"user_api_key_hash": "k1"}, None),
        ("key", {"user_api_key_hash": "k1", "user_api_key_team_id": "t"}, "key:k1"),
        ("key", {}, None),
        ("team", {"user_api_key_hash": "k1", "user_api_key_team_id": "t"}, "team:t"),
        ("team", {"user_api_key_hash": "k1"}, "key:k1"),
        ("blue", {"user_api_key_hash": "k1"}, "fixed:blue"),
        (None, {"user_api_key_user_id": "u", "user_api_key_team_id": "t"}, "user:u"),
        (None, {"user_api_key_team_id": "t"}, "team:t"),
    ],
)
@pytest.mark.parametrize(
    ("slot", "clients"),
    [
        ("metadata", None),
        ("litellm_metadata", None),
        ("litellm_metadata", {"user_id": "u", "user_api_key": "k2"}),
        ("metadata", {"user_api_key": "k2"}),
    ],
)
def test_the_tenant_is_cache_salt_or_key_of_the_proxy(salt, metadata, expected, slot, clients):
    other = {"metadata": "litellm_metadata", "litellm_metadata": "metadata"}[slot]
    info = {} if salt is None else {"mlx": {"cache_salt": salt}}
    params = {"model_info": info, slot: metadata, other: clients}
    assert request(litellm_params=params).salt == expected


def test_keys_with_a_common_cache_salt_have_separate_accounts():
    params = {"model_info": {"mlx": {"cache_salt": "all"}}, "metadata": {"user_api_key_hash": "k"}}
    made = request(litellm_params=params)
    assert (made.salt, made.tenant, made.share) == (None, "key:k", 1.0)
    assert request().tenant is None


@pytest.mark.parametrize(
    ("key", "team", "share"),
    [
        ({"service_tier": "priority"}, {"service_tier": "flex"}, 4.0),
        ({}, {"service_tier": "flex"}, 0.25),
        ({"service_tier": "default"}, None, 1.0),
        ({"service_tier": 7}, {}, 1.0),
    ],
)
def test_the_service_tier_of_a_key_precedes_that_of_its_team(key, team, share):
    told = {"user_api_key_metadata": key, "user_api_key_team_metadata": team}
    assert request(litellm_params={"litellm_metadata": told, "metadata": {}}).share == share


@pytest.mark.parametrize(
    ("info", "origin"),
    [
        ({"id": "1", "configured_model": sign("/models/a")}, "owner"),
        ({"id": "1", "configured_model": sign("*")}, "client"),
        ({"id": "1", "configured_model": "/models/a"}, "client"),
        ({"id": "1"}, "client"),
        ({}, "client"),
    ],
)
def test_the_signed_model_of_the_config_entry_decides_the_origin(info, origin):
    """Closed where no entry is known behind a proxy, or its model is not known."""
    params = {"model_info": info, "proxy_server_request": {"body": {}}}
    assert request(model_name="/models/a", litellm_params=params).origin == origin
    script = {"model_info": {"mlx": {"tool_parser": "hermes"}}}
    for given in ({}, script):
        assert request(model_name="/models/a", litellm_params=given).origin == "owner"


def test_the_timeout_of_a_call_becomes_the_time_limit_of_the_request():
    made = request(timeout=500.0)
    assert made.timeout is not None
    assert 400 < made.timeout <= 500
    assert request().timeout is None


@pytest.mark.parametrize(
    ("retention", "retain"), [("24h", True), ("in_memory", False), (None, False)]
)
def test_prompt_cache_retention_of_24h_asks_to_retain_the_prefix(retention, retain):
    assert request(prompt_cache_retention=retention).retain == retain
