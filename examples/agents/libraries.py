"""Python clients: each runs a tool loop and says how it ended.

Run by the Python of the environment that has the library; see `python_clients.py`. Prompts come in
the environment: `LOOP`, a script of one call and then two at once, `ONE` of a single call, and
`PERSON`, whose reply is an object, called for or said.
"""

import asyncio
import json
import os
import sys

BASE, MODEL = os.environ["BASE"], "scripted-200k"
KEY = os.environ["OPENAI_API_KEY"]
LOOP = os.environ["LOOP"]
CALLED: list[tuple[int, int]] = []
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    CALLED.append((a, b))
    return a + b


def openai_chat() -> str:
    import openai

    client = openai.OpenAI()
    tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    messages = [{"role": "user", "content": LOOP}]
    for _ in range(4):
        made = client.chat.completions.create(
            model=MODEL, messages=messages, tools=tools, stream=True
        )
        text, calls = "", {}
        for chunk in made:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or []:
                    known = calls.setdefault(call.index, {"id": call.id, "name": "", "with": ""})
                    known["name"] += call.function.name or ""
                    known["with"] += call.function.arguments or ""
        if not calls:
            return text
        told = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["with"]},
            }
            for call in calls.values()
        ]
        messages.append({"role": "assistant", "content": text, "tool_calls": told})
        for call in calls.values():
            result = str(add(**json.loads(call["with"])))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return text


def openai_responses() -> str:
    import openai

    client = openai.OpenAI()
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
    items = [{"role": "user", "content": LOOP}]
    for _ in range(4):
        reply = client.responses.create(model=MODEL, input=items, tools=tools)
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return reply.output_text
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        for call in calls:
            result = str(add(**json.loads(call.arguments)))
            told = {"type": "function_call_output", "call_id": call.call_id, "output": result}
            items.append(told)
    return reply.output_text


def anthropic_messages() -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=BASE, api_key=KEY)
    tools = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    messages = [{"role": "user", "content": LOOP}]
    for _ in range(4):
        asked = {"model": MODEL, "max_tokens": 2000, "messages": messages, "tools": tools}
        with client.messages.stream(**asked) as stream:
            reply = stream.get_final_message()
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return reply.content[-1].text
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": str(add(**call.input))}
            for call in calls
        ]
        messages += [
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": results},
        ]
    return reply.content[-1].text


def litellm_completion() -> str:
    import litellm

    tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    messages = [{"role": "user", "content": LOOP}]
    for _ in range(4):
        reply = litellm.completion(
            model=f"litellm_proxy/{MODEL}",
            messages=messages,
            tools=tools,
            api_base=BASE,
            api_key=KEY,
        )
        said = reply.choices[0].message
        if not said.tool_calls:
            return said.content
        messages.append(said)
        for call in said.tool_calls:
            result = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return str(said.content)


def instructor_models() -> str:
    import instructor
    import openai
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(), mode=mode)
        prompt = os.environ["PERSON_CALL" if mode is instructor.Mode.TOOLS else "PERSON"]
        person = client.chat.completions.create(
            model=MODEL,
            response_model=Person,
            max_retries=0,
            messages=[{"role": "user", "content": prompt}],
        )
        assert (person.name, person.age) == ("Ada", 36), (mode, person)
    return "structured"


def langchain_openai() -> str:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL).bind_tools([tool(add)])
    messages = [HumanMessage(LOOP)]
    for _ in range(4):
        reply = None
        for chunk in model.stream(messages):
            reply = chunk if reply is None else reply + chunk
        if not reply.tool_calls:
            return str(reply.content)
        messages.append(reply)
        messages += [
            ToolMessage(str(add(**call["args"])), tool_call_id=call["id"])
            for call in reply.tool_calls
        ]
    return str(reply.content)


def langgraph_agent() -> str:
    import warnings

    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    warnings.simplefilter("ignore")
    agent = create_react_agent(ChatOpenAI(model=MODEL), [add])
    return str(agent.invoke({"messages": [("user", LOOP)]})["messages"][-1].content)


def openai_agents() -> str:
    import agents

    agents.set_tracing_disabled(True)
    said = ""
    for api in ("chat_completions", "responses"):
        CALLED.clear()
        agents.set_default_openai_api(api)
        agent = agents.Agent(name="x", model=MODEL, tools=[agents.function_tool(add)])
        said = asyncio.run(agents.Runner.run(agent, LOOP)).final_output
        assert len(CALLED) == 3, (api, said)
    return said


def pydantic_ai() -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

    said = ""
    for kind in (OpenAIChatModel, OpenAIResponsesModel, AnthropicModel):
        CALLED.clear()
        agent = Agent(kind(MODEL), tools=[add])
        said = agent.run_sync(LOOP).output
        assert len(CALLED) == 3, (kind.__name__, said)
    return said


def smolagents_agent() -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(MODEL, api_base=f"{BASE}/v1", api_key=KEY)
    agent = ToolCallingAgent(tools=[tool(add)], model=model, max_steps=5, verbosity_level=0)
    return str(agent.run(os.environ["LOOP_ANSWER"]))


def llama_index() -> str:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=MODEL,
        api_base=f"{BASE}/v1",
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=100_000,
    )

    async def told() -> str:
        return str(await FunctionAgent(tools=[add], llm=model, system_prompt="s").run(LOOP))

    return asyncio.run(told())


if __name__ == "__main__":
    text = globals()[sys.argv[1]]()
    print(json.dumps({"said": text, "called": CALLED}))
