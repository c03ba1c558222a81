"""OpenAI's Responses API over the same requests and events as chat. Nothing is stored."""
