"""A model that writes a script: text, reasoning and calls of tools.

Tests of a client, a parser, a gateway or a plugin need a model whose next words are known:

    from mlx_provider.testing.scripted import Call, Step, build, environment, script

    folder = build(tmp_path / "model", "json", context_length=32_768)
    both = (Call("read", {"path": "a"}), Call("read", {"path": "b"}))
    prompt = script(Step("Looking.", (Call("bash", {"command": "ls"}),)), Step(calls=both))

The script is in the user's message; the client may write anything around it. The first step
answers that message, the second what follows the first tool results, and so on; then the model
ends with a text that quotes the last tool result. Without a script it repeats the question.

It is a model like any other: rendered by a chat template, tokenised (some three letters a token),
prefilled in chunks, decoded token by token, sampled, masked by grammars, cached and cut. It
reads what it says only from its KV cache, so that a wrong cache gives wrong words.

| of a step | does |
|---|---|
| `think` | a thought before the rest |
| `say` | text |
| `count` | the numbers from 1 up to this one, after the text |
| `calls` | tool calls, all at once |
| `slow` | seconds for each token of the reply |
| `prefill` | seconds for its whole prompt, by tokens: those from the prefix cache take none |
| `since` | a time, in seconds since 1970, that `prefill` counts from |

Prompts of one engine whose `prefill` counts from one moment take their time side by side.

`build` writes the folder of such a model, `FORMATS` names how it can write calls. The family is a
plugin like any third party's. Other processes (an engine, a proxy) find it if their environment has
`environment(folder)`; nothing has to be installed. A test in one process uses the family directly:
`family.FAMILY.load(folder, LoadOptions())`.

The answer to a request for a summary of the conversation, with which coding agents make room, is a
summary that contains the rest of the script. A request for a title, without tools, gets a title.
"""

from .checkpoint import build
from .discovery import environment
from .formats import FORMATS
from .script import Call, Step, script

__all__ = ["FORMATS", "Call", "Step", "build", "environment", "script"]
