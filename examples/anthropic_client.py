"""The same proxy from Anthropic's client: ANTHROPIC_BASE_URL and ANTHROPIC_AUTH_TOKEN."""

import anthropic

client = anthropic.Anthropic()
with client.messages.stream(
    model="demo",
    max_tokens=100,
    messages=[{"role": "user", "content": "What is the capital of Italy?"}],
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()
