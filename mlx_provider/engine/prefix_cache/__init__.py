"""KV and states of earlier prompts: `tree` (nodes, match), `cache` (four verbs), `policy` (how an
engine uses it), `segments`, `buffers`, `handover` (to nodes), `eviction`, `disk`, `files`."""
