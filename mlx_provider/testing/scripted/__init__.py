"""A model that says what it is told and calls the tools that it is told to call.

Whoever tests a client, a parser, a gateway or a plugin needs a model whose next words are known:

    from mlx_provider.testing.scripted import Call, Step, build, environment, script

    folder = build(tmp_path / "model", "json", context_length=32_768)
    both = (Call("read", {"path": "a"}), Call("read", {"path": "b"}))
    prompt = script(Step("Looking.", (Call("bash", {"command": "ls"}),)), Step(calls=both))

The script stands in the user's message, whatever the client writes around it. The first step
answers that message, the second what follows the first tool results, and so on; then the model
ends with a text that quotes the last tool result. Without a script it says what it was asked.

It is a model like any other: rendered by a chat template, tokenised (some three letters a token),
prefilled in chunks, decoded token by token, sampled, masked by grammars, cached and cut. What it
says it reads from its KV cache alone, so that a wrong cache gives wrong words.

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
plugin like a stranger's. In a process of its own (an engine, a proxy) it is found where
`environment(folder)` is part of that process's environment: nothing has to be installed. A test of
one process takes the family as it is: `family.FAMILY.load(folder, LoadOptions())`.

A request for a summary of the conversation, by which coding agents make room, is answered with
a summary that carries the rest of the script on. One for a title, without tools, gets a title.
"""

from .checkpoint import build
from .discovery import environment
from .formats import FORMATS
from .script import Call, Step, script

__all__ = ["FORMATS", "Call", "Step", "build", "environment", "script"]
