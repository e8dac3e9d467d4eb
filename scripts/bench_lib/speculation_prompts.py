"""Conversations for measuring speculation, as many different ones as are asked for: every round has its own, so that
nothing is known from the round before."""

from random import Random

Message = dict[str, str]

LETTERS = """
The lighthouse at {place} was built in {year} by {name}, who had lost two brothers to the reef. It stands {number}
metres tall, and its lamp can be seen from {other} miles away. In the winter of that year the keeper kept the light
burning for six days during a storm. Today it is a museum that opens from May to October.

Dear {name}, thank you for your order of {number} oak shelves. They will leave our workshop in {place} on Monday and
should reach you within {other} days. The invoice is enclosed; please pay it within a month. If a shelf arrives damaged,
write to us and we will replace it at no cost. Order number: {year}.

Minutes of the council of {place}, {year}. {name} opened the meeting with {number} members present. The council agreed
to repair the bridge over the mill stream before the autumn, at a cost of {other} thousand crowns. The question of the
market square was put off until the next meeting. There was no other business.
"""
CODE = """
def {lower}_area(width, height):
    # the area of the {place} field, in units of {year}
    if width < {number} or height < {other}:
        raise ValueError("a side is too short")
    return width * height


def {lower}_perimeter(width, height):
    if width < {number} or height < {other}:
        raise ValueError("a side is too short")
    return 2 * (width + height)
"""
PASSAGES = (*(" ".join(letter.split()) for letter in LETTERS.split("\n\n")), CODE.strip())
EXTRACTIVE = (
    "Repeat the following text word for word.\n\n{text}",
    "Fix the spelling mistakes in the following text and give back all of it.\n\n{text}",
    "Rewrite the following text, but say '{new}' instead of '{name}'.\n\n{text}",
)
NAMES = ("Ellen Hask", "Tom Breen", "Mary Dunn", "Otto Lind", "Ada Moss", "Paul Grey", "Nora Finch", "Hugo Stein")
PLACES = ("Marrow Point", "Alder Bay", "Cold Harbour", "Stonefield", "Westbrook", "Larkhill", "Old Ferry", "Thornby")

QUESTIONS = (
    "Why is the sky blue in the day and red in the evening?", "Give me three tips for better sleep.",
    "What is the difference between a fruit and a vegetable?", "Write a short poem about the sea in winter.",
    "How do vaccines work?", "Explain recursion to a child.", "What should I pack for a week in the mountains?",
    "Write a friendly email that asks a colleague for help with a report.", "How is cheese made?",
    "What caused the fall of the Roman Empire?", "Suggest a simple dinner with rice and eggs.",
    "What are the main parts of a computer?", "How can I learn to play the guitar?",
    "Tell me a story about a brave mouse.", "What is photosynthesis?", "Describe the water cycle.",
)  # fmt: skip
FLAVOURS = ("", " Keep it short.", " Give an example.", " Use simple words.",
            *(f" I am in {place}." for place in PLACES), *(f" I am {name}." for name in NAMES))  # fmt: skip


def extractive(rng: Random, count: int) -> list[list[Message]]:
    """Tasks whose answers repeat most of what was given."""
    prompts = []
    for _ in range(count):
        name, new = rng.sample(NAMES, 2)
        text = rng.choice(PASSAGES).format(
            name=name, lower=name.split()[0].lower(), place=rng.choice(PLACES), year=rng.randrange(1400, 2000),
            number=rng.randrange(2, 99), other=rng.randrange(2, 99),
        )  # fmt: skip
        prompts.append(_user(rng.choice(EXTRACTIVE).format(text=text, name=name, new=new)))
    return prompts


def chat(rng: Random, count: int) -> list[list[Message]]:
    """Questions, mostly answered in words of the model's own."""
    questions = [question + flavour for question in QUESTIONS for flavour in FLAVOURS]
    return [_user(text) for text in rng.sample(questions, count)]


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


WORKLOADS = {"extractive": extractive, "chat": chat}
