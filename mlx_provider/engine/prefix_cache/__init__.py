"""KV and states of earlier prompts: `tree`, `cache` (four verbs), `policy` (how an engine uses it),
`segments`, `buffers` and `handover` (what nodes store), `eviction`, `disk`, `files`."""
