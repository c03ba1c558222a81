"""Checks that anyone can run over an installed plugin: `pytest --mlx-conformance NAME`.

| module | checks |
|---|---|
| `loading` | any plugin: it loads, and what listing it imports |
| `tool_parsers`, `reasoning_parsers` | formats: cuts of the text, grammars, cut replies, bombs |
| `families` | model families, one checkpoint in one format at a time |
| `drafters` | drafters: answers are the same with and without them |
| `kernels` | kernels: results are those of the functions that they replace |

`cases` puts them together for one plugin, `items` makes pytest run them, and keeps a record.
"""
