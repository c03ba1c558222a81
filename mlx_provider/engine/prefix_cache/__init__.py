"""KV and states of earlier prompts: `tree` (nodes, match), `cache` (four verbs), `policy` (how an
engine uses it), `segments` and `buffers` (what nodes store), `eviction`, `disk`, `files`."""
