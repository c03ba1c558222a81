"""Stands in for any client: reads what the real one would read, asks its API, tells what it saw.

It goes by the name of the command that it is started under, and imports the standard library alone.
"""

import json
import os
import re
import signal
import stat
import sys
import tomllib
import urllib.request
from pathlib import Path

QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]


def filled(text):
    """References to variables, in the forms that clients take."""
    return re.sub(r"\$(\w+)|\{env:(\w+)\}", lambda found: os.environ[found[1] or found[2]], text)


def read_json(path):
    return json.loads(Path(path).read_text())


def claude():
    env = os.environ
    if folder := env.get("CLAUDE_CONFIG_DIR"):
        denied = read_json(Path(folder) / "settings.json")["permissions"]["deny"]
        assert "WebSearch" in denied, "no engine searches the web"
    return env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_AUTH_TOKEN"], env["ANTHROPIC_MODEL"]


def codex():
    config = tomllib.loads((Path(os.environ["CODEX_HOME"]) / "config.toml").read_text())
    provider = config["model_providers"][config["model_provider"]]
    assert provider["wire_api"] == "responses"
    return provider["base_url"], os.environ[provider["env_key"]], config["model"]


def opencode(variable="OPENCODE_CONFIG"):
    config = read_json(os.environ[variable])
    name, _, model = config["model"].partition("/")
    provider = config["provider"][name]
    assert model in provider["models"]
    return provider["options"]["baseURL"], filled(provider["options"]["apiKey"]), model


def kilo():
    return opencode("KILO_CONFIG")


def qwen():
    settings = read_json(Path(os.environ["QWEN_HOME"]) / "settings.json")
    (model,) = settings["modelProviders"][settings["security"]["auth"]["selectedType"]]
    assert model["id"] == settings["model"]["name"]
    return model["baseUrl"], os.environ[model["envKey"]], model["id"]


def pi():
    folder = Path(os.environ["PI_CODING_AGENT_DIR"])
    settings = read_json(folder / "settings.json")
    provider = read_json(folder / "models.json")["providers"][settings["defaultProvider"]]
    (model,) = provider["models"]
    assert model["id"] == settings["defaultModel"]
    return provider["baseUrl"], filled(provider["apiKey"]), model["id"]


def cn():
    (model,) = read_json(sys.argv[sys.argv.index("--config") + 1])["models"]
    key = re.sub(r"\$\{\{ secrets\.(\w+) \}\}", lambda found: os.environ[found[1]], model["apiKey"])
    return model["apiBase"], key, model["model"]


def cline():
    settings = read_json(os.environ["CLINE_PROVIDER_SETTINGS_PATH"])
    entry = settings["providers"][settings["lastUsedProvider"]]["settings"]
    return entry["baseUrl"], entry["apiKey"], entry["model"]


def aider():
    model = os.environ["AIDER_MODEL"]
    return os.environ["OPENAI_API_BASE"], os.environ["OPENAI_API_KEY"], model.partition("/")[2]


MESSAGES_BODY = {"messages": MESSAGES, "max_tokens": 40}
ROUTES = {
    "claude": ("/v1/messages", MESSAGES_BODY),
    "codex": ("/responses", {"input": QUESTION, "max_output_tokens": 40}),
}
CHAT = ("/chat/completions", MESSAGES_BODY)


def subagent():
    """Claude Code's main model and local agent, both through the gateway."""
    name, _, value = os.environ["ANTHROPIC_CUSTOM_HEADERS"].partition(": ")
    (agent,) = json.loads(sys.argv[sys.argv.index("--agents") + 1]).values()
    token = "Bearer sk-ant-oat01-of-the-user"
    answers = [
        post(f"{os.environ['ANTHROPIC_BASE_URL']}/v1/messages", model, MESSAGES_BODY, headers)
        for model, headers in (
            ("claude-opus-5", {name: value, "authorization": token}),
            ("claude-opus-5", {name: value, "x-api-key": os.environ["ANTHROPIC_API_KEY"]}),
            (agent["model"], {name: value, "authorization": token}),
            (agent["model"], {name: value, "x-api-key": os.environ["ANTHROPIC_API_KEY"]}),
        )
    ]
    return os.environ["ANTHROPIC_BASE_URL"], answers


def post(url, model, body, headers):
    data = json.dumps({**body, "model": model}).encode()
    headers = {**headers, "content-type": "application/json"}
    request = urllib.request.Request(url, data, headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
        return reply.read().decode()


def answer(command):
    if "--agents" in sys.argv:
        return subagent()
    url, key, model = globals()[command]()
    path, body = ROUTES.get(command, CHAT)
    body = {**body, "temperature": 0}  # which vendors refuse
    return url, post(url + path, model, body, {"authorization": f"Bearer {key}"})


def main():
    command = Path(sys.argv[0]).name
    url, reply = answer(command)
    seen = {"arguments": sys.argv[1:], "url": url, "answer": reply}
    seen["environment"] = dict(os.environ)
    seen["tty"] = sys.stdin.isatty()
    found = [path for path in Path(os.environ["LAUNCHES"]).rglob("*") if path.is_file()]
    seen["modes"] = {str(path): stat.S_IMODE(path.stat().st_mode) for path in found}
    draft = Path(os.environ["SEEN"] + ".draft")
    draft.write_text(json.dumps(seen))
    if "wait" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *signalled: sys.exit(7))
        draft.rename(os.environ["SEEN"])
        signal.pause()
    draft.rename(os.environ["SEEN"])
    sys.exit(7)


main()
