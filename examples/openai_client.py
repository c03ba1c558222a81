"""A proxy from OpenAI's client: OPENAI_BASE_URL and OPENAI_API_KEY say where and as whom.

`mlx-provider demo --keep` prints both.
"""

import openai

client = openai.OpenAI()
turns = [{"role": "user", "content": "My name is Maria."}]

reply = client.chat.completions.create(model="demo", messages=turns, temperature=0)
turns.append({"role": "assistant", "content": reply.choices[0].message.content})
turns.append({"role": "user", "content": "What is my name?"})

stream = client.chat.completions.create(
    model="demo",
    messages=turns,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:
        cached = chunk.usage.prompt_tokens_details.cached_tokens
        print(f"\n{chunk.usage.prompt_tokens} prompt tokens, {cached} of them reused")
