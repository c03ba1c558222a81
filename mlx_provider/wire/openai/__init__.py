"""The API of OpenAI: parameters to requests of the engine, and its events to JSON."""
