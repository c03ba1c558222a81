"""LiteLLM without a proxy: importing `mlx_provider.litellm` registers the provider."""

import litellm

import mlx_provider.litellm  # noqa: F401

messages = [{"role": "user", "content": "What is the capital of France?"}]

reply = litellm.completion(model="mlx/demo", messages=messages, temperature=0)
print(reply.choices[0].message.content)
print(reply.usage.completion_tokens, "tokens")

for chunk in litellm.completion(
    model="mlx/demo", messages=[{"role": "user", "content": "Tell me a story."}], stream=True
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
