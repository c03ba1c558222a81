"""The official clients of OpenAI and Anthropic: they try once, and ask no proxy of the machine.

They speak plain HTTP, so they read no certificates, which takes 20 ms each time."""

from typing import Any

import openai


def openai_client(url: str, key: str, **more: Any) -> openai.OpenAI:
    """`url`: of a server, without `/v1`."""
    http = openai.DefaultHttpxClient(trust_env=False, verify=False)
    given = {"max_retries": 0, "http_client": http, **more}
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, **given)


def anthropic_client(url: str, key: str) -> Any:
    import anthropic  # slow: most test processes need no such client

    http = anthropic.DefaultHttpxClient(trust_env=False, verify=False)
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, http_client=http)
