"""Chat with a model folder through a LiteLLM proxy of its own: `python chat.py FOLDER`.

An empty line, Ctrl-D or Ctrl-C ends the chat and the proxy. The engine process ends by itself
once nobody has used it for ten minutes.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import openai

from mlx_provider.gateway.config import proxy_config, write_config
from mlx_provider.gateway.proxy import start_proxy

NAME = "smollm2"


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat with a model through a LiteLLM proxy.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve(strict=True)
    with tempfile.TemporaryDirectory() as scratch:
        config = write_config(proxy_config(NAME, str(folder)), Path(scratch))
        proxy = start_proxy(config, os.environ)
        try:
            proxy.wait_ready()
            with openai.OpenAI(
                base_url=f"{proxy.url}/v1",
                api_key=proxy.key,
                http_client=openai.DefaultHttpxClient(trust_env=False),  # no proxy to loopback
            ) as client:
                chat(client)
        except (EOFError, KeyboardInterrupt):
            print()
        finally:
            proxy.stop()


def chat(client: openai.OpenAI) -> None:
    """Take turns until an empty line."""
    messages: list[Any] = []
    while said := input("> "):
        messages.append({"role": "user", "content": said})
        stream = client.chat.completions.create(
            model=NAME, messages=messages, stream=True, temperature=0, max_tokens=400
        )
        reply = ""
        for chunk in stream:
            text = chunk.choices[0].delta.content or "" if chunk.choices else ""
            print(text, end="", flush=True)
            reply += text
        print()
        messages.append({"role": "assistant", "content": reply})


if __name__ == "__main__":
    main()
