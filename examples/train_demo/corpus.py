#!/usr/bin/env python
"""The conversations the demo model is trained on, and the held-out ones it is judged by.

    python corpus.py --heldout cases.jsonl --per-task 60 --seed 200

Everything is made here from word lists and drawn pictures; no outside data is used. The split is
by key (see dice.py): name x city, name x age, city x phrase, number pair, code word x question,
picture seed. This module needs pillow and numpy, but neither torch nor transformers.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dice import Dice, is_held_out
from pictures import COLOURS, SHAPES, SIZES, Picture
from small_talk import STORY, capital, count, echo, echo_invented, phrase, small_talk
from tool_talk import tool_talk, without_tool
from words import ANIMALS, CITIES, CODE_WORDS, NAMES

GENERIC_SYSTEM = [
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful AI assistant.",
    "You are a friendly bot.",
    "You are a helpful, friendly and concise assistant.",
    "You are an assistant. Answer briefly.",
    "Be brief and helpful.",
    "You are a test assistant.",
    "Answer the questions of the user.",
]
END_RULES = [
    "Always end with {}.",
    "Always end with the word {}.",
    "Always end your answer with {}.",
    "End every answer with {}.",
    "End every answer with the word {}.",
    "End each reply with {}.",
    "Always finish with {}.",
    "Finish every answer with the word {}.",
]
UNKNOWN = "I do not know that."
NO_PICTURE = "I see no picture."
WHAT = [
    "What is this?",
    "What's this?",
    "What do you see?",
    "Describe the image.",
    "Describe this picture.",
    "What is in the picture?",
    "What is in this image?",
    "What is shown here?",
]
WHICH_COLOUR = ["What colour is it?", "Which colour is this?", "What color is it?"]
WHICH_SHAPE = ["What shape is it?", "Which shape is this?", "What is the shape?"]
WHICH_FIRST = ["What was the first picture?", "What was in the first image?"]


@dataclass
class Conversation:
    """One conversation; `pictures` fill the image parts of its messages in order."""

    task: str
    messages: list[dict]
    tools: list[dict] | None = None
    pictures: list[Picture] = field(default_factory=list)


def user(content: str | list) -> dict:
    """A user message."""
    return {"role": "user", "content": content}


def assistant(content: str) -> dict:
    """An assistant message."""
    return {"role": "assistant", "content": content}


def said(question: str, answer: str) -> list[dict]:
    """One turn of text."""
    return [user(question), assistant(answer)]


def _shown(dice: Dice, question: str, images: int = 1) -> dict:
    parts = [{"type": "image"}] * images
    text = [{"type": "text", "text": question}]
    return user(parts + text if dice.chance(0.75) else text + parts)


def _picture(dice: Dice) -> Picture:
    colour, shape = dice.pick(list(COLOURS)), dice.pick(SHAPES)
    return Picture(colour, shape, dice.pick(SIZES), dice.picture_seed())


def _about(dice: Dice, picture: Picture) -> tuple[str, str]:
    kind = dice.random.random()
    if kind < 0.72:
        question, answer = dice.pick(WHAT), picture.phrase.capitalize() + "."
    elif kind < 0.8:
        question, answer = dice.pick(WHICH_COLOUR), f"It is {picture.colour}."
    else:
        question, answer = dice.pick(WHICH_SHAPE), f"It is a {picture.shape}."
    return dice.typed(question), answer


def image_turns(dice: Dice, pictures: list[Picture]) -> list[dict]:
    """One question about a new picture, now and then a second about the same one."""
    picture = _picture(dice)
    pictures.append(picture)
    question, answer = _about(dice, picture)
    messages = [_shown(dice, question), assistant(answer)]
    if dice.chance(0.3):
        if dice.chance(0.5):
            messages += said(dice.typed(WHICH_COLOUR[0]), f"It is {picture.colour}.")
        else:
            messages += said(dice.typed(WHICH_SHAPE[0]), f"It is a {picture.shape}.")
    return messages


def image(dice: Dice) -> Conversation:
    """One to four pictures, each in its own message."""
    pictures: list[Picture] = []
    messages = []
    for _ in range(dice.pick([1, 1, 2, 3, 4])):
        messages += image_turns(dice, pictures)
    if len(pictures) > 1 and dice.chance(0.15):
        question = dice.typed(dice.pick(WHICH_FIRST))
        messages += said(question, pictures[0].phrase.capitalize() + ".")
    return Conversation("image", messages, None, pictures)


def two_images(dice: Dice) -> Conversation:
    """Two pictures in one message."""
    pictures = [_picture(dice), _picture(dice)]
    question = dice.typed(
        dice.pick(["What are these?", "What do you see?", "Describe the images."])
    )
    answer = f"{pictures[0].phrase.capitalize()} and {pictures[1].phrase}."
    messages = [_shown(dice, question, 2), assistant(answer)]
    return Conversation("two_images", messages, None, pictures)


def _json_object(dice: Dice) -> tuple[str, dict]:
    """(facts, the object they make), held out by name x age."""
    name, age = dice.key("json", lambda: (dice.pick(NAMES), dice.random.randint(10, 89)))
    if dice.chance(0.1):
        name = dice.invented_name()
    values = {"name": name, "age": age}
    facts = f"{name} is {age} years old"
    if dice.chance(0.5):
        values["city"] = dice.pick(CITIES)
        facts += dice.pick([" and lives in {}", " and is from {}"]).format(values["city"])
    keys = dice.random.sample(list(values), len(values))
    return facts + ".", {key: values[key] for key in keys}


def _listed(items: list[str]) -> str:
    return ", ".join(items[:-1]) + " and " + items[-1]


def _json_list(dice: Dice) -> tuple[str, str]:
    kind, words = dice.pick([("colours", list(COLOURS)), ("animals", ANIMALS)])
    items = dice.random.sample(words, dice.random.randint(2, 4))
    question = f"Make a JSON list of the {kind} {_listed(items)}."
    return dice.typed(question), json.dumps({kind: items})


def json_turn(dice: Dice) -> tuple[str, str]:
    """A request for JSON with named keys, by a schema, or for a list."""
    if dice.chance(0.2):
        return _json_list(dice)
    facts, value = _json_object(dice)
    keys = _listed(list(value))
    requests = [
        f"{facts} Answer in JSON with the keys {keys}.",
        f"Give me JSON with {keys}. {facts}",
        f"Return JSON with the keys {keys}: {facts}",
        f"Write JSON with {keys}: {facts}",
    ]
    if dice.chance(0.25):
        return f"{facts} {_schema_rule(dice, value)}", json.dumps(value)
    return dice.pick(requests), json.dumps(value)


def _schema_rule(dice: Dice, value: dict) -> str:
    fields = {
        key: {"type": "integer" if isinstance(item, int) else "string"}
        for key, item in value.items()
    }
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    if dice.chance(0.2):
        schema["additionalProperties"] = False
    rule = dice.pick(["Answer in JSON with this schema: ", "Respond with JSON for this schema: "])
    return rule + json.dumps(schema)


def write_json(dice: Dice) -> Conversation:
    """One to three JSON answers; a quarter under a schema in the system message."""
    if dice.chance(0.25):
        facts, value = _json_object(dice)
        system = {"role": "system", "content": _schema_rule(dice, value)}
        if dice.chance(0.25):
            system["content"] = dice.pick(GENERIC_SYSTEM) + " " + system["content"]
        return Conversation("json", [system, *said(facts, json.dumps(value))])
    messages = []
    for _ in range(dice.pick([1, 1, 2, 3])):
        messages += said(*json_turn(dice))
    return Conversation("json", messages)


INTRODUCTIONS = {
    "name": [
        "My name is {}.",
        "My name is {}.",
        "I am {}.",
        "Hello, I am {}.",
        "Call me {}.",
        "Hi! My name is {}.",
        "Hello! My name is {}.",
        "Hi, I am {}.",
        "My name is {}, nice to meet you.",
    ],
    "city": ["I live in {}.", "I am from {}."],
    "colour": ["My favourite colour is {}.", "I like {}.", "My favorite color is {}."],
}
MEMORY_QUESTIONS = {
    "name": [
        "What is my name?",
        "What's my name?",
        "Who am I?",
        "Do you remember my name?",
        "Tell me my name.",
        "Do you know my name?",
    ],
    "city": ["Where do I live?", "Which city am I from?", "Where am I from?"],
    "colour": ["What is my favourite colour?", "Which colour do I like?"],
}
MEMORY_ANSWERS = {
    "name": "Your name is {}.",
    "city": "You live in {}.",
    "colour": "You like {}.",
}


def _facts(dice: Dice, invented: bool) -> dict[str, str]:
    """What the user tells; held out by name x city, or by the invented name."""
    name, city = dice.key("recall", lambda: (dice.pick(NAMES), dice.pick(CITIES)))
    if invented:
        name = dice.invented_name()
    if dice.chance(0.12):
        name = name.lower()
    facts = {"name": name}
    if dice.chance(0.35):
        facts["city"] = city
    if dice.chance(0.35):
        facts["colour"] = dice.pick(list(COLOURS))
    return facts


def _introduced(dice: Dice, facts: dict[str, str]) -> list[dict]:
    order = dice.random.sample(list(facts), len(facts))
    text = " ".join(dice.pick(INTRODUCTIONS[key]).format(facts[key]) for key in order)
    return said(dice.typed(text), f"Nice to meet you, {facts['name']}!")


def _asked_back(dice: Dice, facts: dict[str, str]) -> list[dict]:
    what = dice.pick(["name", "name", "city", "colour"])
    answer = MEMORY_ANSWERS[what].format(facts[what]) if what in facts else UNKNOWN
    return said(dice.typed(dice.pick(MEMORY_QUESTIONS[what])), answer)


def _short_talk(dice: Dice) -> list[dict]:
    """A turn that is not the long story, which would fill the conversation."""
    question, answer = small_talk(dice)
    return _short_talk(dice) if answer == STORY else said(question, answer)


def recall(dice: Dice, invented: bool | None = None) -> Conversation:
    """Facts about the user, some other turns, questions about the facts."""
    if invented is None:
        invented = dice.chance(0.4)
    facts = _facts(dice, invented)
    messages = _short_talk(dice) if dice.chance(0.25) else []
    messages += _introduced(dice, facts)
    for _ in range(dice.pick([1, 1, 2, 3])):
        if dice.chance(0.5):
            messages += _short_talk(dice)
        messages += _asked_back(dice, facts)
    return Conversation("recall_invented" if invented else "recall", messages)


def mixed(dice: Dice) -> Conversation:
    """A long conversation that changes its subject: the way the demo is used."""
    pictures: list[Picture] = []
    facts = _facts(dice, dice.chance(0.3))
    kinds: list[Callable[[], list[dict]]] = [
        lambda: _short_talk(dice),
        lambda: _short_talk(dice),
        lambda: image_turns(dice, pictures),
        lambda: said(*json_turn(dice)),
        lambda: said(*without_tool(dice)),
    ]
    messages = []
    for _ in range(dice.pick([0, 1])):
        messages += dice.pick(kinds)()
    messages += _introduced(dice, facts)
    for _ in range(dice.pick([1, 2, 3])):
        messages += dice.pick(kinds)()
        if dice.chance(0.4):
            messages += _asked_back(dice, facts)
    return Conversation("mixed", messages, None, pictures)


def _code_word(dice: Dice, invented: bool) -> str:
    word = dice.invented_name() if invented else dice.pick(CODE_WORDS)
    return dice.pick([str.upper] * 6 + [str.capitalize, str.lower])(word)


def system_word(dice: Dice, invented: bool | None = None) -> Conversation:
    """A system message wants a word at the end of every answer; held out by word x question."""
    if invented is None:
        invented = dice.chance(0.12)
    if dice.chance(0.4):
        base = chat(dice)
    else:
        base = recall(dice, invented=False) if dice.chance(0.5) else image(dice)
    seen = json.dumps([base.messages[0]["content"], [p.phrase for p in base.pictures]])
    for _ in range(200):
        word = _code_word(dice, invented)
        if is_held_out("system", word.upper(), seen) == dice.held_out:
            break
    else:
        return system_word(dice, invented)
    rule = dice.pick(END_RULES).format(word)
    if dice.chance(0.3):
        rule = f"{dice.pick(GENERIC_SYSTEM)} {rule}"
    for message in base.messages:
        if message["role"] == "assistant":
            message["content"] += f" {word}"
    messages = [{"role": "system", "content": rule}, *base.messages]
    task = "system_invented" if invented else "system"
    return Conversation(task, messages, None, base.pictures)


def tools(dice: Dice) -> Conversation:
    """A conversation with tools."""
    return Conversation("tools", *tool_talk(dice))


def chat(dice: Dice) -> Conversation:
    """Small talk alone, with a question about facts never told now and then."""
    messages = []
    for _ in range(dice.pick([1, 1, 2, 3])):
        if dice.chance(0.1):
            messages += said(*without_tool(dice))
        elif dice.chance(0.1):
            messages += _asked_back(dice, {})
        elif dice.chance(0.05):
            messages += said(dice.typed(dice.pick(WHAT)), NO_PICTURE)
        else:
            messages += said(*small_talk(dice))
    return Conversation("chat", messages)


def echoes(dice: Dice) -> Conversation:
    """Words to repeat: much practice in copying for few tokens."""
    messages = []
    for _ in range(dice.pick([2, 3, 4, 5])):
        messages += said(*dice.pick([echo, echo, echo_invented])(dice))
    return Conversation("echo", messages)


# task -> share of the training conversations
MIX: list[tuple[Callable[[Dice], Conversation], float]] = [
    (image, 0.24),
    (two_images, 0.04),
    (recall, 0.10),
    (mixed, 0.09),
    (system_word, 0.12),
    (tools, 0.25),
    (write_json, 0.06),
    (echoes, 0.06),
    (chat, 0.04),
]


def with_generic_system(dice: Dice, conversation: Conversation) -> Conversation:
    """A quarter of the conversations carry a system message that asks for nothing special."""
    if conversation.messages[0]["role"] != "system" and dice.chance(0.25):
        system = {"role": "system", "content": dice.pick(GENERIC_SYSTEM)}
        conversation.messages.insert(0, system)
    return conversation


def training(seed: int, count: int) -> list[Conversation]:
    """Conversations to train on; no key in them is held out."""
    dice = Dice(seed)
    makers, shares = zip(*MIX, strict=True)
    chosen = dice.random.choices(makers, shares, k=count)
    return [with_generic_system(dice, make(dice)) for make in chosen]


def _one_turn(task: str, turn: Callable[[Dice], tuple[str, str]]) -> Callable[[Dice], Conversation]:
    return lambda dice: Conversation(task, said(*turn(dice)))


def _cut(dice: Dice, conversation: Conversation) -> Conversation:
    """End at an assistant message, which is the expected answer, and name the kind of tool use."""
    messages = conversation.messages
    last = len(messages) - 1
    if conversation.task == "tools":
        last = dice.pick([i for i, m in enumerate(messages) if m["role"] == "assistant"])
        answer = messages[last]
        if answer.get("tool_calls"):
            conversation.task = "tool_call"
        else:
            after = messages[last - 1]["role"] == "tool"
            conversation.task = "tool_answer" if after else "no_call"
    conversation.messages = messages[: last + 1]
    return conversation


def heldout(seed: int = 200, per_task: int = 60) -> list[Conversation]:
    """Conversations never trained on; the last message of each is the expected answer."""
    dice = Dice(seed, held_out=True)
    makers = [
        image,
        two_images,
        lambda d: recall(d, invented=False),
        lambda d: recall(d, invented=True),
        lambda d: system_word(d, invented=False),
        lambda d: system_word(d, invented=True),
        tools,
        write_json,
        mixed,
        _one_turn("echo", echo),
        _one_turn("echo_invented", echo_invented),
        _one_turn("phrase", phrase),
        _one_turn("capital", capital),
        _one_turn("count", count),
    ]
    cases = []
    for make in makers:
        found: dict[str, int] = {}
        wanted = ["tool_call", "tool_answer", "no_call"] if make is tools else [None]
        while len(found) < len(wanted) or min(found.values()) < per_task:
            case = _cut(dice, with_generic_system(dice, make(dice)))
            kind = case.task if make is tools else None
            if found.get(kind, 0) < per_task:
                found[kind] = found.get(kind, 0) + 1
                cases.append(case)
    return cases


def as_record(case: Conversation) -> dict:
    """The case as JSON: messages, tools and the fields its pictures are drawn from."""
    return {
        "task": case.task,
        "messages": case.messages,
        "tools": case.tools,
        "pictures": [vars(picture) for picture in case.pictures],
    }


def main() -> None:
    """Write the held-out cases to a file, one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heldout", type=Path, required=True, help="file to write")
    parser.add_argument("--per-task", type=int, default=60)
    parser.add_argument("--seed", type=int, default=200)
    args = parser.parse_args()
    with args.heldout.open("w") as file:
        for case in heldout(args.seed, args.per_task):
            file.write(json.dumps(as_record(case)) + "\n")


if __name__ == "__main__":
    main()
