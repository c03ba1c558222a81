"""Conversations with tools: a call, the answer to its result, and no call where none is needed."""

import json

from dice import Dice
from small_talk import small_talk
from words import CITIES

NO_TOOL = "I have no tool for that."
QUESTIONS = {
    "weather": [
        "What is the weather in {}?",
        "What's the weather in {}?",
        "How is the weather in {}?",
        "Weather in {}?",
        "Is it sunny in {}?",
        "What's the weather like in {}?",
        "What is the weather like in {} today?",
    ],
    "time": ["What time is it in {}?", "Tell me the time in {}.", "What is the time in {}?"],
    "add": ["What is {} plus {}?", "Add {} and {}.", "How much is {} plus {}?"],
    "multiply": ["What is {} times {}?", "Multiply {} and {}.", "How much is {} times {}?"],
}
TOOL_NAMES = {
    "weather": "get_weather",
    "time": "get_time",
    "add": "add",
    "multiply": "multiply",
}
DESCRIPTIONS = {
    "weather": [
        "Get the weather in a city",
        "Get the current weather",
        "Weather for a city",
        "Get the current weather for a city.",
        "Look up the weather.",
    ],
    "time": ["Get the time in a city", "Get the local time", "The time in a city."],
    "add": ["Add two numbers", "Add a and b", "Add two numbers."],
    "multiply": ["Multiply two numbers", "Multiply a and b", "Multiply two numbers."],
}
SKIES = ["sunny", "cloudy", "rainy", "windy", "snowy"]


def _city_schema(dice: Dice, topic: str) -> tuple[dict, list[str]]:
    place = dice.pick(["city", "city", "location"])
    fields = {place: {"type": "string"}}
    if dice.chance(0.3):
        fields[place]["description"] = dice.pick(["The city", "City name", "Name of the city"])
    if topic == "weather" and dice.chance(0.15):  # an optional field the answer leaves out
        fields["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    return fields, [place]


def _number_schema(dice: Dice) -> tuple[dict, list[str]]:
    kind = dice.pick(["number", "integer"])
    return {name: {"type": kind} for name in ("a", "b")}, ["a", "b"]


def _tool(dice: Dice, topic: str) -> tuple[dict, str, list[str]]:
    """(definition, its name, the argument names a call gives)."""
    if topic in ("weather", "time"):
        fields, needed = _city_schema(dice, topic)
    else:
        fields, needed = _number_schema(dice)
    name = TOOL_NAMES[topic]
    parameters = {"type": "object", "properties": fields}
    if dice.chance(0.9):
        parameters["required"] = needed
    if dice.chance(0.15):
        parameters["additionalProperties"] = False
    function = {"name": name, "description": dice.pick(DESCRIPTIONS[topic])}
    if dice.chance(0.15):
        del function["description"]
    function["parameters"] = parameters
    return {"type": "function", "function": function}, name, needed


def _asked(dice: Dice, topic: str) -> tuple[str, list]:
    """(question, argument values), held out by city x phrase or by the pair of numbers."""
    phrases = QUESTIONS[topic]
    if topic in ("weather", "time"):
        city, phrase = dice.key(topic, lambda: (dice.pick(CITIES), dice.pick(phrases)))
        return dice.typed(phrase.format(city)), [city]
    numbers = dice.key(topic, lambda: (dice.random.randint(1, 99), dice.random.randint(1, 99)))
    return dice.typed(dice.pick(phrases).format(*numbers)), list(numbers)


def _json(dice: Dice, value: object) -> str:
    """JSON as servers write it, with or without spaces."""
    return json.dumps(value, separators=None if dice.chance(0.7) else (",", ":"))


def _result(dice: Dice, topic: str, values: list) -> tuple[str, str]:
    """(what the tool returns, what the assistant says about it)."""
    if topic == "weather":
        degrees, sky = dice.random.randint(1, 35), dice.pick(SKIES)
        result = {"temperature": degrees, "condition": sky}
        if dice.chance(0.4):
            result = {"city": values[0]} | result
        text = f"{sky}, {degrees} degrees" if dice.chance(0.15) else _json(dice, result)
        return text, f"It is {sky} in {values[0]} with {degrees} degrees."
    if topic == "time":
        clock = f"{dice.random.randint(0, 23):02d}:{dice.random.randrange(0, 60, 5):02d}"
        text = clock if dice.chance(0.2) else _json(dice, {"time": clock})
        return text, f"It is {clock} in {values[0]}."
    value = sum(values) if topic == "add" else values[0] * values[1]
    text = str(value) if dice.chance(0.5) else _json(dice, {"result": value})
    return text, f"The result is {value}."


def _call(name: str, arguments: dict) -> dict:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def _said(question: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def without_tool(dice: Dice) -> tuple[str, str]:
    """A question that wants a tool where no tool is given."""
    return _asked(dice, dice.pick(["weather", "time"]))[0], NO_TOOL


def tool_talk(dice: Dice) -> tuple[list[dict], list[dict]]:
    """(messages, tools) of one conversation; it may end at any assistant message."""
    topics = dice.random.sample(list(QUESTIONS), dice.pick([1, 1, 2, 2, 3]))
    if "weather" not in topics and dice.chance(0.5):
        topics[0] = "weather"
    made = {topic: _tool(dice, topic) for topic in topics}
    messages: list[dict] = []
    for _ in range(dice.pick([1, 1, 2, 2, 3])):
        if dice.chance(0.35):
            missing = [topic for topic in QUESTIONS if topic not in topics]
            if missing and dice.chance(0.5):
                messages += _said(_asked(dice, dice.pick(missing))[0], NO_TOOL)
            else:
                messages += _said(*small_talk(dice))
            continue
        topic = dice.pick(topics)
        question, values = _asked(dice, topic)
        _, name, fields = made[topic]
        messages.append({"role": "user", "content": question})
        messages.append(_call(name, dict(zip(fields, values, strict=True))))
        result, answer = _result(dice, topic, values)
        messages.append({"role": "tool", "content": result})
        messages.append({"role": "assistant", "content": answer})
    return messages, [definition for definition, _, _ in made.values()]
