"""What the target is asked, so that it writes text to train on: every task with every topic, in a shuffled order."""

import random

TASKS = """
What is {topic}?
Explain {topic} to a child.
Explain {topic} in two paragraphs.
Why does {topic} matter?
Write a short story about {topic}.
Write a poem about {topic}.
Give me five facts about {topic}.
List the advantages and disadvantages of {topic}.
What are common mistakes people make about {topic}?
Write an email to a colleague about {topic}.
Write a dialogue between two friends about {topic}.
How did {topic} change over the last hundred years?
Summarize what is known about {topic} in three sentences.
Give step by step instructions for someone new to {topic}.
Make a table of contents for a book about {topic}.
Write three quiz questions about {topic}, with answers.
What would you tell a beginner about {topic}?
Compare {topic} with its closest alternative.
Write the first paragraph of an article about {topic}.
Write a product review that mentions {topic}.
Invent a conversation in which a teacher talks about {topic}.
What questions should I ask an expert on {topic}?
Write a news report about {topic}.
I know nothing about {topic}. Where do I start?
Write a persuasive speech in favour of {topic}.
Describe {topic} using a simple comparison.
What is the history of {topic}?
Write a Python function that has something to do with {topic}, and explain it.
Write a JSON object that describes {topic}.
Give a numbered list of ten ideas about {topic}.
Who should care about {topic}, and why?
Write a letter from the year 1900 about {topic}.
Complete this sentence and go on: The most surprising thing about {topic} is
Once upon a time there was somebody who loved {topic}. Continue the story.
Translate your favourite sentence about {topic} into French.
Plan a weekend around {topic}.
Is {topic} good or bad? Give both sides.
Write a recipe or a procedure inspired by {topic}.
What are the key terms of {topic}? Define each of them.
Solve a small everyday problem with the help of {topic}.
""".strip().splitlines()

TOPICS = """
photosynthesis|the water cycle|black holes|electric cars|public libraries|chess|baking bread|the Roman Empire|vaccines
prime numbers|climate change|football|jazz music|the human heart|sleep|budgeting|job interviews|gardening|volcanoes
the internet|sorting algorithms|machine learning|bicycles|tea|coffee|dogs|cats|bees|whales|dinosaurs|the Moon|Mars
solar power|nuclear energy|bridges|the printing press|democracy|taxes|inflation|small businesses|remote work
meditation|running a marathon|swimming|yoga|healthy eating|vegetarian cooking|chocolate|rice|potatoes|the ocean
rain forests|deserts|mountains|rivers|earthquakes|weather forecasts|airplanes|trains|sailing|maps|clocks|calendars
the French Revolution|ancient Egypt|the Silk Road|the Renaissance|Shakespeare|fairy tales|science fiction|poetry
painting|photography|films|video games|board games|learning a language|writing letters|public speaking|friendship
honesty|patience|courage|memory|habits|dreams|the brain|bones|blood|bacteria|viruses|DNA|evolution|gravity|light
sound|magnets|electricity|batteries|computers|programming|databases|passwords|spreadsheets|statistics|geometry
fractions|probability|logic puzzles|robots|3D printing|recycling|plastic|drinking water|city parks|traffic
""".replace("\n", "|").strip("|").split("|")


def built_in(seed: int) -> list[str]:
    """All of them, about 5,000, in an order of the seed."""
    prompts = [task.format(topic=topic) for task in TASKS for topic in TOPICS]
    random.Random(seed).shuffle(prompts)
    return prompts
