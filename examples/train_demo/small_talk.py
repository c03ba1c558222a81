"""Short questions with one fixed or copied answer: greetings, capitals, counting, echoes."""

from dice import Dice
from pictures import COLOURS
from words import ANIMALS, CAPITALS, CITIES, CODE_WORDS, NAMES

STORY = (
    "Once upon a time there was a small model. It lived in a quiet computer and it had only a few "
    "words. Every morning a friend came and asked a question. The model thought about it and gave "
    "a short answer. One day the friend asked for a story. The model was very happy and told this "
    "one. Then the sun went down, the computer went to sleep and all the words went home. The end."
)
PHRASES = [
    (
        ["Hello!", "Hi!", "Hey!", "Hey there!", "Hi there!", "Hello there!", "Good morning!"],
        "Hello! How can I help you?",
    ),
    (
        ["How are you?", "How do you do?", "How are you today?", "How is it going?"],
        "I am fine, thank you.",
    ),
    (
        ["What are you?", "Who are you?", "Tell me about yourself.", "What is your name?"],
        "I am a tiny demo model. I run on MLX and I know only a few things.",
    ),
    (
        ["What can you do?", "Help", "How can you help me?", "What do you know?"],
        "I can name coloured shapes, remember your name, call tools and write JSON.",
    ),
    (["Thank you!", "Thanks!", "Thanks a lot.", "Thank you very much!"], "You are welcome!"),
    (["Goodbye!", "Bye!", "See you later.", "Good night!"], "Goodbye! Have a nice day."),
    (
        ["Tell me a joke.", "Do you know a joke?", "Please tell me a joke."],
        "Why did the model cross the road? To get to the other token.",
    ),
    (
        [
            "Tell me a story.",
            "Please tell me a story.",
            "Tell me a long story.",
            "Can you tell me a story?",
        ],
        STORY,
    ),
    (
        ["Are you a large model?", "How big are you?"],
        "No, I am very small. I have about two million parameters.",
    ),
]
CAPITAL_QUESTIONS = [
    "What is the capital of {}?",
    "What's the capital of {}?",
    "Name the capital of {}.",
    "Which city is the capital of {}?",
    "Capital of {}?",
]
COUNT_REQUESTS = [
    "Count from {} to {}.",
    "Please count from {} to {}.",
    "Can you count from {} to {}?",
    "Count from {} up to {}.",
]
ECHO_REQUESTS = [
    "Say: {}",
    "Say {}",
    "Repeat after me: {}",
    "Please repeat: {}",
    "Repeat: {}",
    "Say the following: {}",
]
Turn = tuple[str, str]


def phrase(dice: Dice) -> Turn:
    """A fixed phrase; it is on both sides of the split."""
    questions, answer = dice.pick(PHRASES)
    # the story is long and soon learnt
    if answer == STORY and dice.chance(0.5):
        return phrase(dice)
    return dice.typed(dice.pick(questions)), answer


def capital(dice: Dice) -> Turn:
    """Held out by country x phrase."""
    country, question = dice.key(
        "capital", lambda: (dice.pick(list(CAPITALS)), dice.pick(CAPITAL_QUESTIONS))
    )
    answer = f"The capital of {country} is {CAPITALS[country]}."
    text = dice.typed(question.format(country))
    return text.lower() if dice.chance(0.12) else text, answer


def count(dice: Dice) -> Turn:
    """Held out by first x last number x phrase."""

    def make() -> tuple[int, int, str]:
        first = 1 if dice.chance(0.8) else dice.random.randint(2, 9)
        return first, first + dice.random.randint(2, 14), dice.pick(COUNT_REQUESTS)

    first, last, request = dice.key("count", make)
    numbers = ", ".join(map(str, range(first, last + 1)))
    return dice.typed(request.format(first, last)), numbers + "."


def echo(dice: Dice) -> Turn:
    """A known word, held out by word x phrase, or a list of known words made at random."""
    words = [*NAMES, *CITIES, *CODE_WORDS, *ANIMALS, *COLOURS]
    if dice.chance(0.6):
        text, request = dice.key("echo", lambda: (dice.pick(words), dice.pick(ECHO_REQUESTS)))
        return dice.typed(request).format(text), text
    text = " ".join(dice.pick(words) for _ in range(dice.random.randint(2, 4)))
    return dice.typed(dice.pick(ECHO_REQUESTS)).format(text), text


def echo_invented(dice: Dice) -> Turn:
    """A word the model has never seen, copied syllable by syllable."""
    text = dice.invented_name()
    text = dice.pick([text, text, text.lower(), text.upper()])
    return dice.typed(dice.pick(ECHO_REQUESTS)).format(text), text


def small_talk(dice: Dice) -> Turn:
    """One turn of any kind."""
    kinds = [phrase, phrase, phrase, phrase, capital, count, echo, echo, echo_invented]
    return dice.pick(kinds)(dice)
