"""`mlx-provider bench compare`: ours beside other servers, behind one LiteLLM proxy, in one run.

| module | is about |
|---|---|
| `plan` | what is measured, how large, and the command that repeats it |
| `others` | servers that run already |
| `sides` | whoever takes part, each with a client through the proxy |
| `rows` | one figure's place: part, model, case, server |
| `answers`, `speed`, `reuse`, `isolation`, `stall` | the parts, from sides to rows |
| `run` | models in turn, parts in turn |
| `progress`, `machine` | what is told of the run |
| `result` | what a run leaves, and several runs as one |
| `verdict` | where ours is not faster, and where answers are not as alone |
| `markdown`, `pictures` | the result for people |
"""
