"""KV and states of earlier prompts, by tokens."""
