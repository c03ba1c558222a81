"""KV and state of prompts seen before, by token."""
