"""What a key of the proxy sees of another's, and which models a wildcard lets it name."""

import httpx
import pytest

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
    "/v1/responses": {"input": "x"},
    "/v1/completions": {"prompt": "x"},
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("slot", ["metadata", "litellm_metadata"])
def test_every_route_uses_the_tenant_of_the_caller_alone(engine, raw, route, slot):
    """Also where the client sends metadata of its own, as agents do, or forges the proxy's."""
    tenants = set()
    forged = {"user_api_key": "victim", "user_api_key_hash": "victim", "user_id": "me"}
    for more in ({}, {slot: forged}):
        answer = raw.post(route, json={"model": "scripted", **ROUTES[route], **more})
        assert answer.status_code == 200, answer.text
        tenants.add(engine.request["salt"])
    (tenant,) = tenants
    assert tenant.startswith("key:")
    assert "victim" not in tenant


@pytest.mark.parametrize("route", [route for route in ROUTES if route[3:] != "/completions"])
def test_a_chat_cannot_be_turned_into_a_raw_prompt(engine, raw, route):
    answer = raw.post(route, json={"model": "scripted", **ROUTES[route], "text_completion": True})
    assert answer.status_code == 400
    assert "unknown parameter: text_completion" in answer.text


def test_a_client_of_a_wildcard_cannot_find_out_which_folders_exist(own_engine, raw: httpx.Client):
    def asked(folder: str) -> tuple[int, str]:
        body = {"model": f"anything/{folder}", "messages": [{"role": "user", "content": "x"}]}
        answer = raw.post("/v1/chat/completions", json=body)
        return answer.status_code, answer.json()["error"]["message"].replace(folder, "")

    # of one length: LiteLLM takes longer ones for secrets, which it blanks
    assert asked("/etc") == asked("/etq") == asked("/bin/sh") == asked("/bin/qq")
    status, message = asked("/etc")
    assert status == 404
    assert "MLX_PROVIDER_MODEL_ROOTS" in message


@pytest.mark.parametrize("form", ["{}", "encoded", "{},demo", "demo,{}"])
def test_a_client_of_a_wildcard_cannot_load_a_folder_of_the_owner(
    own_engine, raw: httpx.Client, embedding_model, form
):
    """Neither by a name in percent signs, nor beside an entry's name in a comma list."""
    folder = str(embedding_model)
    letters = "".join(f"%{byte:02X}" for byte in folder.encode())
    name = f"anything/{letters}" if form == "encoded" else form.format(f"anything/{folder}")
    body = {"model": name, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    answer = raw.post("/v1/chat/completions", json=body)
    assert folder not in [model.model for model in own_engine.health().models]
    assert "MLX_PROVIDER_MODEL_ROOTS" in answer.text or "no model" in answer.text, answer.text
