"""`mlx-provider bench compare`: ours and other servers behind one LiteLLM proxy, in one run.

| module | is about |
|---|---|
| `plan` | the measurements, their sizes, and the command that repeats them |
| `others` | running servers |
| `sides` | the participants, each with a client through the proxy |
| `rows` | the place of a figure: part, model, case, server |
| `answers`, `speed`, `reuse`, `isolation`, `stall` | the parts, from sides to rows |
| `run` | models in turn, parts in turn |
| `progress`, `machine` | progress and machine of the run |
| `result` | the result of a run, or of several runs |
| `verdict` | cases in which ours is not faster, and answers that differ from those alone |
| `markdown`, `pictures` | the result for people |
"""
