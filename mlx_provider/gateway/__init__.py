"""A LiteLLM proxy of this user's, and the programs of others that are started on it.

| module | is about |
|---|---|
| `config` | what a proxy's configuration says, as a mapping and as a file for people |
| `proxy` | the proxy's process |
| `engine` | the engine behind it: warmed up, ended |
| `start` | both, started side by side |
| `models` | which models there are, and what of their context fits into memory |
| `recommended` | which ones suit this machine |
| `standing` | a gateway that stays: started, found again, ended |
| `kept` | its folder, key, record and lock |
| `login_item` | what starts it at login |
| `profile` | a client's files, variables and command, from its record |
| `foreground` | a client in the terminal: signals, exit code |
| `apart` | engine and proxy of one command alone |
| `session` | all of these together, one line a phase |
"""
