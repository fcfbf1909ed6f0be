"""Dates in words -> ISO dates: pairs for a task other than translation.

    the twenty-first of March, 1987  ->  1987-03-21

python examples/dates.py
accelerate launch train.py --config examples/dates.yaml
vanilla-transformer evaluate --model outputs/dates --dataset_name outputs/dates_dataset
"""

import random
from datetime import date, timedelta

from common import Pair, make_parser, write_dataset

FIRST, LAST = date(1900, 1, 1), date(2099, 12, 31)
SPLIT_SIZES = {"train": 10_000, "validation": 500, "test": 500}

# Not from `calendar`, whose names depend on the locale.
MONTHS = [
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
]  # fmt: skip
SMALL = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
IRREGULAR = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"}
IRREGULAR |= {"twelve": "twelfth", "twenty": "twentieth", "thirty": "thirtieth"}

PHRASES = [
    "the {ordinal} of {month}, {year}",
    "{month} the {ordinal}, {year_in_words}",
    "the {ordinal} day of {month} in {year_in_words}",
    "{month} {day}, {year}",
    "{day_th} {month} {year_in_words}",
    "{day} {mon} {year}",
]


def number(n: int) -> str:
    """21 -> twenty-one; up to 99."""
    if n < 20:
        return SMALL[n]
    return TENS[n // 10] + (f"-{SMALL[n % 10]}" if n % 10 else "")


def ordinal(n: int) -> str:
    """21 -> twenty-first; up to 31."""
    *tens, last = number(n).split("-")
    return "-".join([*tens, IRREGULAR.get(last, f"{last}th")])


def with_ending(n: int) -> str:
    """21 -> 21st."""
    return f"{n}{ordinal(n)[-2:]}"


def year_in_words(year: int) -> str:
    """1987 -> nineteen eighty-seven, 1906 -> nineteen oh six, 2006 -> two thousand and six."""
    century, rest = divmod(year, 100)
    if century == 20 and rest < 10:
        return "two thousand" + (f" and {number(rest)}" if rest else "")
    if rest == 0:
        return f"{number(century)} hundred"
    return f"{number(century)} {'oh ' if rest < 10 else ''}{number(rest)}"


def say(day: date, phrase: str) -> str:
    """A date written as one of PHRASES."""
    month = MONTHS[day.month - 1]
    days = {"day": day.day, "day_th": with_ending(day.day), "ordinal": ordinal(day.day)}
    years = {"year": day.year, "year_in_words": year_in_words(day.year)}
    return phrase.format(month=month, mon=month[:3], **days, **years)


def make_splits(seed: int) -> dict[str, list[Pair]]:
    """Uses each date once, so that no date is in two splits, in any wording."""
    rng = random.Random(seed)
    days = iter(rng.sample(range((LAST - FIRST).days + 1), sum(SPLIT_SIZES.values())))
    splits = {}
    for split, size in SPLIT_SIZES.items():
        dates = [FIRST + timedelta(days=next(days)) for _ in range(size)]
        splits[split] = [(say(day, rng.choice(PHRASES)), day.isoformat()) for day in dates]
    return splits


def main(argv: list[str] | None = None):
    options = make_parser(__doc__, "outputs/dates_dataset").parse_args(argv)
    # `datasets` reads a JSON column of ISO dates as timestamps; in CSV they stay text.
    write_dataset(options.output_dir, make_splits(options.seed), ".csv")


if __name__ == "__main__":
    main()
