"""Makes the quickstart's data: text to pretrain a small base model, and instructions to fine-tune it.

The text is an almanac of an invented world: words written backwards, their letters sorted, sums, counting,
opposites, plurals, past tenses, and the capitals and rivers of invented countries. A model pretrained on it
continues such text; it has never seen an instruction.

The instructions ask for the same facts in other words and want the bare answer. Train and test share no
argument: a country, a word or a sum that `test.jsonl` asks about is never asked about in `train.jsonl`. So
fine-tuning teaches how to answer; the capital of a held-out country can only come from the pretraining text.

    python quickstart/make_data.py            writes train.jsonl and test.jsonl beside this file
    python quickstart/make_data.py --text 5   prints five documents of the pretraining text
"""

import argparse
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

SEED = 7  # of the geography, the text and the instructions
ROWS = {"train": 320, "test": 30}  # of each kind of instruction, or fewer where there are not so many

# --- Words ------------------------------------------------------------------------------------------------


def pairs(table: str) -> list[tuple[str, str]]:
    """Split "hot cold, ..." into [("hot", "cold"), ...]."""
    return [(first, second) for first, second in (entry.split() for entry in table.split(","))]


WORDS = """
acorn actor amber angel apple apron arrow attic autumn badge baker basin basket beach beard berry birch
blade blanket bloom board boat bonus border bottle brave bread brick bridge bright broom brush bucket
butter button cabin cable cactus camel camera candle canoe carbon carpet castle cedar cello chain chair
chalk charm cheese cherry chest circle circus citrus clay clever cliff clock cloud clover coast cobalt
comet copper coral corner cotton couch cradle crane crayon cream crown crystal curtain daisy dance desert
diamond dinner doctor dolphin donkey dragon drum eagle early earth easel echo elbow ember emerald engine
fable falcon family feather fence fern ferry fiddle field finger flag flame flute forest fossil fox frame
frost fruit galaxy garden garlic ginger glass globe glove gold grape grass gravel green guitar hammer
harbor harp harvest hazel heron hill hinge honey horizon hotel ice insect island ivory jacket jasmine
jelly jewel journey juice jungle kettle kite kitten ladder lake lamp lantern laurel lemon lilac lime linen
lizard locket lotus lunar magnet mango maple marble market meadow melon metal mirror monkey month morning
moss motor mountain music nectar needle night noble nutmeg oasis ocean olive onion opal orange orchid
otter owl oyster paint palace palm panda paper parrot pebble pencil pepper piano pillow pilot pine planet
plum pocket poem polar pond poplar potato powder prism puzzle quartz queen quiet quilt rabbit radio raven
ribbon robin rocket rose ruby saddle sail salt sand saturn school season shadow shell ship silver singer
sketch sky smoke snail snow sofa soup spark spice spider spoon spring square stable star stone storm
stream sugar summer sunset swan table tea temple thunder ticket tiger timber tomato tower train travel
tulip tunnel turtle valley vanilla velvet violin walnut water whale wheat willow window winter wizard wolf
wonder yellow zebra zenith zinc
""".split()  # noqa: SIM905

OPPOSITES = pairs("""
hot cold, big small, tall short, fast slow, early late, light dark, happy sad, open closed, full empty,
rich poor, hard soft, wet dry, old young, clean dirty, loud quiet, strong weak, high low, near far, sweet
bitter, deep shallow, kind cruel, true false, right wrong, alive dead, awake asleep, polite rude, safe
risky, tame wild, bright dim, north south, east west, day night, summer winter, friend enemy, love hate,
war peace, buy sell, give take, push pull, win lose, begin finish, laugh cry, rise fall, float sink, build
destroy, remember forget, accept refuse
""")

PLURALS = pairs("""
mouse mice, goose geese, tooth teeth, foot feet, man men, woman women, child children, ox oxen, leaf
leaves, wolf wolves, knife knives, wife wives, life lives, shelf shelves, half halves, thief thieves, loaf
loaves, calf calves, elf elves, scarf scarves, city cities, baby babies, lady ladies, berry berries, fairy
fairies, pony ponies, story stories, body bodies, army armies, spy spies, fly flies, cherry cherries, box
boxes, fox foxes, bus buses, glass glasses, dish dishes, brush brushes, church churches, match matches,
watch watches, peach peaches, beach beaches, bench benches, potato potatoes, tomato tomatoes, hero heroes,
echo echoes, apple apples, river rivers, stone stones, cloud clouds, lamp lamps, tree trees, bird birds,
horse horses, house houses, ship ships, road roads, book books, king kings, queen queens, star stars,
flower flowers, boy boys, key keys, day days, toy toys, monkey monkeys, donkey donkeys
""")

PASTS = pairs("""
go went, see saw, eat ate, take took, give gave, come came, run ran, sing sang, ring rang, drink drank,
swim swam, begin began, write wrote, ride rode, drive drove, rise rose, speak spoke, break broke, steal
stole, freeze froze, choose chose, know knew, grow grew, throw threw, blow blew, fly flew, draw drew, wear
wore, tear tore, bear bore, find found, bind bound, wind wound, think thought, bring brought, buy bought,
fight fought, catch caught, teach taught, seek sought, sleep slept, keep kept, weep wept, sweep swept,
feel felt, leave left, meet met, lead led, feed fed, send sent, spend spent, bend bent, lend lent, build
built, sell sold, tell told, hold held, stand stood, win won, dig dug, stick stuck, hang hung, sit sat,
make made, say said, pay paid, hear heard, lose lost, shoot shot, light lit, walk walked, jump jumped,
paint painted, help helped, play played, stay stayed, climb climbed, open opened, call called
""")


# --- The invented world -----------------------------------------------------------------------------------


def invented(rng: Random, syllables: int) -> str:
    """Make a pronounceable word: alternating consonants and vowels, sometimes with a final consonant."""
    word = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(syllables))
    return word + rng.choice(["", "", "l", "n", "r", "s", "t"])


def geography(countries: int = 40) -> list[dict[str, str]]:
    """Countries with their capital and river, every name used once."""
    rng = Random(SEED)
    names: list[str] = []
    while len(names) < 3 * countries:
        name = invented(rng, syllables=2).capitalize()
        if name not in names:
            names.append(name)
    kinds = ("country", "capital", "river")
    return [dict(zip(kinds, names[i : i + 3], strict=True)) for i in range(0, len(names), 3)]


WORLD = geography()


def arguments_of_tasks() -> set[str]:
    """The words and names that tasks are about. None is a token by itself: the model sees letters."""
    lexicon = [word for table in (OPPOSITES, PLURALS, PASTS) for pair in table for word in pair]
    names = [name for place in WORLD for name in place.values()]
    return {*WORDS, *lexicon, *names}


# --- Pretraining text -------------------------------------------------------------------------------------


def in_alphabetical_order(word: str) -> str:
    return "".join(sorted(word))


def listing(items: list[str]) -> str:
    """ "a, b and c"."""
    return ", ".join(items[:-1]) + " and " + items[-1]


Fact = tuple[list[str], list[str], str]  # statements, questions, and the answer to each of the questions

ASKING = ["", "", "Tell me: ", "Somebody asks: ", "Do you know? ", "Say it in one word: "]
REPLYING = [
    " It is {}.",
    " The answer is {}.",
    "\nIt is {}.",
    "\n{}, of course.",
    "\n{}, they say.",
    "\n{}, I think.",
]


def told(rng: Random, fact: Fact) -> str:
    """Write a fact as a statement, or as a question with its answer."""
    statements, questions, answer = fact
    if rng.random() < 0.5:
        return rng.choice(statements)
    return rng.choice(ASKING) + rng.choice(questions) + rng.choice(REPLYING).format(answer)


def about_words(rng: Random) -> list[Fact]:
    word = rng.choice(WORDS) if rng.random() < 0.5 else invented(rng, rng.choice([2, 2, 3]))
    backwards, ordered, last, length = word[::-1], in_alphabetical_order(word), word[-1], str(len(word))
    reversing = [
        f"Backwards the word {word} reads {backwards}.",
        f"If you write {word} backwards you get {backwards}.",
        f"From the last letter to the first, {word} is {backwards}.",
        f"The reverse of {word} is {backwards}.",
    ]
    sorting = [
        f"The letters of {word} in alphabetical order are {ordered}.",
        f"Sorted, the letters of {word} are {ordered}.",
        f"If you sort {word} by the alphabet you get {ordered}.",
        f"Put in order, the word {word} becomes {ordered}.",
    ]
    counting = [
        f"The word {word} has {length} letters.",
        f"The number of letters in {word} is {length}.",
        f"Whoever can count finds {length} letters in {word}.",
    ]
    ending = [
        f"The last letter of {word} is {last}.",
        f"The word {word} ends with the letter {last}.",
    ]
    hard = [
        (
            reversing,
            [f"How do you write {word} from right to left?", f"How does {word} read backwards?"],
            backwards,
        ),
        (
            sorting,
            [f"How do the letters of {word} sort?", f"In which order does the alphabet put {word}?"],
            ordered,
        ),
    ]
    easy = [
        (counting, [f"How long is the word {word}?", f"What is the number of letters in {word}?"], length),
        (
            ending,
            [f"Which letter stands at the end of {word}?", f"Which is the last letter in {word}?"],
            last,
        ),
    ]
    return [rng.choice(hard), rng.choice(easy)] if rng.random() < 0.5 else [rng.choice(hard)]


def different_initials(rng: Random, count: int, words: Sequence[str]) -> list[str]:
    """Pick `count` words with different first letters, which then decide their alphabetical order."""
    picked: list[str] = []
    while len(picked) < count:
        word = rng.choice(words)
        if word[0] not in {other[0] for other in picked}:
            picked.append(word)
    return picked


def about_the_alphabet(rng: Random) -> list[Fact]:
    words = different_initials(rng, rng.choice([2, 3, 3]), WORDS)
    first, all_words = min(words), listing(words)
    statements = [
        f"Of the words {all_words}, the first in the alphabet is {first}.",
        f"In a dictionary with {all_words}, the word {first} comes first.",
        f"Among {all_words} the alphabet puts {first} first.",
    ]
    questions = [
        f"Which of the words {all_words} is first in the dictionary?",
        f"What is the first word of {all_words}?",
    ]
    return [(statements, questions, first)]


def about_sums(rng: Random) -> list[Fact]:
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    statements = [
        f"{a} plus {b} is {a + b}.",
        f"Adding {b} to {a} gives {a + b}.",
        f"The sum of {a} and {b} is {a + b}.",
        f"{a} coins and {b} coins together are {a + b} coins.",
    ]
    questions = [f"How many are {a} and {b}?", f"What do {a} coins plus {b} coins make?"]
    return [(statements, questions, str(a + b))]


def about_differences(rng: Random) -> list[Fact]:
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    statements = [
        f"{a + b} minus {b} is {a}.",
        f"Taking {b} from {a + b} gives {a}.",
        f"Of {a + b} coins, {b} are spent and {a} remain.",
    ]
    questions = [f"How many of {a + b} remain without {b}?", f"What do {a + b} coins minus {b} coins make?"]
    return [(statements, questions, str(a))]


def about_counting(rng: Random) -> list[Fact]:
    if rng.random() < 0.5:
        step, start, count = rng.randint(1, 5), rng.randint(1, 40), rng.randint(4, 7)
        terms = [str(start + i * step) for i in range(count)]
        openings = ["Counting on", f"Counting by {step}", "A row of numbers", "One after the other"]
    else:
        step, count = rng.randint(1, 3), rng.randint(4, 7)
        start = rng.randrange(26 - step * (count - 1))
        terms = [chr(ord("a") + start + i * step) for i in range(count)]
        openings = ["Along the alphabet", "A row of letters", "One after the other"]
    statements = [f"{opening}: {', '.join(terms)}." for opening in openings]
    known = ", ".join(terms[:-1])
    return [(statements, [f"What follows after {known}?", f"What is the next one after {known}?"], terms[-1])]


def about_opposites(rng: Random) -> list[Fact]:
    a, b = rng.choice(OPPOSITES)
    if rng.random() < 0.5:
        a, b = b, a
    statements = [
        f"The opposite of {a} is {b}.",
        f"What is not {a} at all is {b}.",
        f"Where one says {a}, the other says the opposite: {b}.",
    ]
    return [(statements, [f"What is not {a} but the opposite?", f"Which word is the opposite of {a}?"], b)]


def about_plurals(rng: Random) -> list[Fact]:
    one, many = rng.choice(PLURALS)
    statements = [
        f"One {one}, two {many}.",
        f"The plural of {one} is {many}.",
        f"There was one {one}, and then there were many {many}.",
    ]
    return [(statements, [f"What do you call more than one {one}?", f"Which is the plural of {one}?"], many)]


def about_the_past(rng: Random) -> list[Fact]:
    now, then = rng.choice(PASTS)
    statements = [
        f"Today we {now}, yesterday we {then}.",
        f"The past tense of {now} is {then}.",
        f"Those who {now} today often {then} before.",
    ]
    questions = [f"Today it is {now}, what was it in the past?", f"Which is the past tense of {now}?"]
    return [(statements, questions, then)]


def about_the_world(rng: Random) -> list[Fact]:
    place = rng.choice(WORLD)
    country, capital, river = place["country"], place["capital"], place["river"]
    seats = [
        f"The capital of {country} is {capital}.",
        f"The people of {country} are proud of their capital {capital}.",
        f"The king of {country} lives in the capital, {capital}.",
        f"Every road in {country} leads to its capital, {capital}.",
    ]
    waters = [
        f"The river of {country} is the {river}.",
        f"Through {country} flows the river {river}.",
        f"All the rain of {country} ends in the river {river}.",
    ]
    places = [
        f"The city of {capital} lies in the country {country}.",
        f"{capital} is a city in the country {country}.",
    ]
    facts = [
        (
            seats,
            [f"Which city is the capital of {country}?", f"Where does the king of {country} live?"],
            capital,
        ),
        (
            waters,
            [f"What do people in {country} call their river?", f"Which is the river of {country}?"],
            river,
        ),
        (
            places,
            [f"Where does the city of {capital} lie?", f"Which country has the city of {capital}?"],
            country,
        ),
    ]
    return [rng.choice(facts)]


TOPICS: dict[Callable[[Random], list[Fact]], int] = {  # topic -> its weight in the text
    about_words: 55,
    about_the_alphabet: 14,
    about_sums: 7,
    about_differences: 7,
    about_counting: 14,
    about_opposites: 10,
    about_plurals: 7,
    about_the_past: 7,
    about_the_world: 22,
}


def documents(seed: int) -> Iterator[str]:
    """Yield the pretraining text without end: short documents of a few sentences."""
    rng = Random(seed)
    while True:
        topics = rng.choices(list(TOPICS), weights=list(TOPICS.values()), k=rng.choice([2, 3]))
        lines = [told(rng, fact) for topic in topics for fact in topic(rng)]
        yield rng.choice([" ", "\n"]).join(lines)


# --- Instructions -----------------------------------------------------------------------------------------

Ask = tuple[str, str, str]  # the argument that train and test must not share, the prompt, the answer


def split_of(argument: str) -> str:
    """Assign a fifth of all arguments to the test split, by a checksum, the same for all kinds."""
    return "test" if zlib.crc32(argument.encode()) % 5 == 0 else "train"


def ask_about_a_word(rng: Random, words: Sequence[str], answer: Callable[[str], str], *phrasings: str) -> Ask:
    """Ask for `answer` of one of the words."""
    word = rng.choice(words)
    return word, rng.choice(phrasings).format(word), answer(word)


def ask_for_the_other(rng: Random, table: list[tuple[str, str]], *phrasings: str) -> Ask:
    """Ask for the second word of one of the pairs in `table`."""
    given, answer = rng.choice(table)
    return min(given, answer), rng.choice(phrasings).format(given), answer


def ask_about_a_country(rng: Random, given: str, wanted: str, *phrasings: str) -> Ask:
    """Ask for the `wanted` field of a country of WORLD by its `given` field."""
    place = rng.choice(WORLD)
    return place["country"], rng.choice(phrasings).format(place[given]), place[wanted]


def ask_for_the_next(rng: Random, term: Callable[[int], str], steps: int, last: int, *phrasings: str) -> Ask:
    """Ask for the fifth term of a row: `steps` is the largest step, `last` the largest argument of `term`."""
    step = rng.randint(1, steps)
    start = rng.randint(1, last - 4 * step)
    row = ", ".join(term(start + i * step) for i in range(4))
    return row, rng.choice(phrasings).format(row), term(start + 4 * step)


def ask_for_the_first(rng: Random, words: Sequence[str], *phrasings: str) -> Ask:
    picked = different_initials(rng, 3, words)
    return min(picked), rng.choice(phrasings).format(listing(picked)), min(picked)


def kinds_of_instructions(rng: Random, split: str) -> list[Callable[[], Ask]]:
    """Functions that each draw one instruction of a kind from `rng`; words are those of `split`."""
    words = [word for word in WORDS if split_of(word) == split]
    return [
        lambda: ask_about_a_word(
            rng, words, lambda word: word[::-1],
            "Write the word {} backwards.", "What is {} backwards?", "Reverse the word {}."),
        lambda: ask_about_a_word(
            rng, words, in_alphabetical_order,
            "Sort the letters of the word {}.", "Put the letters of {} in alphabetical order."),
        lambda: ask_about_a_word(
            rng, words, lambda word: str(len(word)),
            "How many letters has the word {}?", "Count the letters of {}."),
        lambda: ask_about_a_word(
            rng, words, lambda word: word[-1],
            "What is the last letter of {}?", "With which letter does {} end?"),
        lambda: ask_for_the_first(
            rng, words,
            "Which word comes first in the alphabet: {}?", "Name the first in the alphabet of {}."),
        lambda: ask_for_the_next(
            rng, str, 5, 60,
            "Which number comes next: {}?", "Continue this row with one number: {}"),
        lambda: ask_for_the_next(
            rng, lambda place: "_abcdefghijklmnopqrstuvwxyz"[place], 3, 26,
            "Which letter comes next: {}?", "Continue this row with one letter: {}"),
        lambda: ask_for_the_other(rng, PLURALS, "What is the plural of {}?", "One {}, many what?"),
        lambda: ask_about_a_country(
            rng, "country", "capital", "What is the capital of {}?", "Name the capital city of {}."),
    ]  # fmt: skip


def instructions(split: str) -> list[dict[str, str]]:
    """The rows of one split ("train" or "test"), shuffled, no prompt twice."""
    rng = Random(f"{SEED} {split}")
    answers: dict[str, str] = {}
    for ask in kinds_of_instructions(rng, split):
        before = len(answers)
        for _ in range(20 * ROWS[split]):
            argument, prompt, answer = ask()
            if split_of(argument) == split:
                answers[prompt] = answer
            if len(answers) == before + ROWS[split]:
                break
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in answers.items()]
    rng.shuffle(rows)
    return rows


def spoilt(rng: Random, answer: str) -> str:
    """A wrong answer that is nearly right: a number near it, or a word with one letter replaced."""
    if answer.isdigit():
        return str(int(answer) + rng.choice([1, 2, 3]))
    at = rng.randrange(len(answer))
    other = rng.choice([letter for letter in "abcdefghilmnoprstu" if letter != answer[at].lower()])
    return answer[:at] + (other.upper() if answer[at].isupper() else other) + answer[at + 1 :]


def preferences(split: str) -> list[dict[str, str]]:
    """The right and a spoilt answer to every instruction of `test`, and to a third of those of `train`."""
    rng = Random(SEED)
    return [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": spoilt(rng, row["completion"])}
        for row in instructions(split)[:: 3 if split == "train" else 1]
    ]


def write(folder: Path) -> None:
    """Write train.jsonl, test.jsonl and their pairs into `folder`."""
    for split in ROWS:
        for name, rows in ((split, instructions(split)), (f"pairs-{split}", preferences(split))):
            lines = (json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the instructions, or show the pretraining text.")
    parser.add_argument("--text", type=int, metavar="N", help="print N documents of the text, write nothing")
    arguments = parser.parse_args()
    if arguments.text is None:
        write(Path(__file__).parent)
    else:
        stream = documents(SEED)
        print("\n\n".join(next(stream) for _ in range(arguments.text)))


if __name__ == "__main__":
    main()
