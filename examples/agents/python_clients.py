"""Which Python clients are run, where, and what must come of it."""

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gateway import Gateway
from installed import Installed
from scenarios import Outcome, faults

from mlx_provider.testing.scripted import Call, Step, script

LIMIT = 120.0
PERSON = {"name": "Ada", "age": 36}
ADDED = [[20, 22], [1, 1], [2, 3]]
STEPS = (
    Step("First.", (Call("add", {"a": 20, "b": 22}),)),
    Step("Both.", tuple(Call("add", {"a": a, "b": b}) for a, b in ((1, 1), (2, 3)))),
)
ANSWER = Step(calls=(Call("final_answer", {"answer": "All 2 steps are done."}),))
PROMPTS = {
    "LOOP": script(*STEPS),
    "LOOP_ANSWER": script(*STEPS, ANSWER),
    "PERSON": script(Step(json.dumps(PERSON))),
    "PERSON_CALL": script(Step(calls=(Call("Person", PERSON),))),
}


@dataclass(frozen=True)
class Library:
    """One way to use one library."""

    name: str
    package: str
    environment: str
    function: str


LIBRARIES = (
    Library("openai, chat", "openai", "newest", "openai_chat"),
    Library("openai, responses", "openai", "newest", "openai_responses"),
    Library("openai 1, chat", "openai", "openai1", "openai_chat"),
    Library("openai 1, responses", "openai", "openai1", "openai_responses"),
    Library("anthropic", "anthropic", "newest", "anthropic_messages"),
    Library("litellm", "litellm", "gateway", "litellm_completion"),
    Library("instructor", "instructor", "frameworks", "instructor_models"),
    Library("langchain-openai", "langchain-openai", "frameworks", "langchain_openai"),
    Library("langgraph", "langgraph", "frameworks", "langgraph_agent"),
    Library("openai-agents", "openai-agents", "frameworks", "openai_agents"),
    Library("pydantic-ai", "pydantic-ai-slim", "newest", "pydantic_ai"),
    Library("smolagents", "smolagents", "frameworks", "smolagents_agent"),
    Library("llama-index", "llama-index-core", "llama-index", "llama_index"),
)


def run(library: Library, gateway: Gateway, installed: Installed) -> Outcome:
    """The tool loop of one library.

    Raises `EngineUnavailable` as soon as proxy or engine are gone.
    """
    moment = gateway.now()
    home = Path(tempfile.mkdtemp(prefix="library-", dir=gateway.engine.log.parent))
    base, key = gateway.proxy.url, gateway.proxy.key
    environ = {
        "HOME": str(home),
        "PATH": "/usr/bin:/bin",
        "BASE": base,
        "OPENAI_API_KEY": key,
        "OPENAI_BASE_URL": f"{base}/v1",
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_BASE_URL": base,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        **PROMPTS,
    }
    script_file = Path(__file__).with_name("libraries.py")
    command = [installed.python(library.environment), script_file, library.function]
    said, told = home / "said.txt", home / "told.txt"
    with said.open("wb") as out, told.open("wb") as err:
        process = subprocess.Popen(command, env=environ, stdout=out, stderr=err)
        try:
            ended = gateway.wait(lambda: process.poll() is not None, LIMIT)
        finally:
            process.kill()
            process.wait()
    if not ended:
        gateway.wait(gateway.free, LIMIT)
        return Outcome(False, f"no end within {LIMIT:.0f} s")
    words = (each.read_text(errors="replace") for each in (said, told))
    return _judged(process.returncode, *words, faults(gateway.since(moment)))


def _judged(code: int, said: str, told: str, wrong: str) -> Outcome:
    lines = said.strip().splitlines()
    if code or not lines:
        return Outcome(False, " ".join(told.split())[-200:])
    result = json.loads(lines[-1])
    if result["said"] == "structured":
        return Outcome(not wrong, wrong or "by calls, JSON and a schema")
    good = result["called"] == ADDED and "All 2 steps" in result["said"]
    if not good:
        return Outcome(False, str(result)[:200])
    return Outcome(not wrong, f"3 calls ({wrong})" if wrong else "3 calls")
