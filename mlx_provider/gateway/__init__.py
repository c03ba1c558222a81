"""A LiteLLM proxy of this user, and the clients that start on it.

| module | content |
|---|---|
| `config` | the configuration of a proxy, as a mapping and as a file for people |
| `proxy` | starts and ends the process of the proxy |
| `litellm_process` | that process |
| `engine` | the engine behind it: warm-up and end |
| `start` | starts both in parallel |
| `models` | available models, and the part of their context that fits into memory |
| `recommended` | recommended models for this machine |
| `standing` | the persistent gateway: starts it, finds it, ends it |
| `kept` | its folder, key, record and lock |
| `login_item` | starts it at login |
| `profile` | files, variables and command of a client, from its record |
| `foreground` | a client in the terminal: signals, exit code |
| `apart` | a separate engine and proxy for one command |
| `progress` | what the user sees of a load, a prompt, an end of the engine |
| `session` | the launch of one client, from start to end |
"""
