"""A LiteLLM proxy of this user, and the clients that start on it."""
