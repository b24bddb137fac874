"""Writes harbour_train.jsonl and harbour_heldout.jsonl: the same bytes every time.

    python examples/data/make_harbour.py

A harbour master's sentences, and the line of compact JSON each becomes in the log of an invented port:

    The Meridian took on 40 crates of salt at quay 3 on Tuesday.
    {"ship":"Meridian","op":"load","n":40,"of":"salt","at":3,"day":"tue"}

Keys, their order, the two operations and the day codes are this project's invention, so a model that was not shown them
answers none of it right. No held-out sentence, and no held-out pair of ship and goods, occurs in the training part;
the ships of ``NEW_SHIPS`` occur in the held-out part only.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

SHIPS = (
    "Meridian,Grey Heron,Corvane,Salt Maiden,Ostrel,Lantern,Second Wind,Marrow,Bright Anna,Tern,Halcott,Old Kestrel,"
    "Windrose,Pelagia,Copper Jane,Northing,Sable,Linnet,Hollow Star,Gannet,Emberly,Quiet Ruth,Fathom,Larkspur"
).split(",")
NEW_SHIPS = "Silver Otter,Brindle,Petrel,Lady Morwen,Dunlin,Harrow".split(",")
GOODS = (
    "salt,lamp oil,wool,rye,copper wire,oranges,tar,dried cod,paper,tea,rope,lime,cheese,slate,nails,honey,coal,olives,"
    "barley,glass,cork,cinnamon,soap,ink"
).split(",")
UNITS = "crates,barrels,sacks,bales,casks,boxes".split(",")
DAYS = "Monday,Tuesday,Wednesday,Thursday,Friday,Saturday,Sunday".split(",")

ACTIVE = {
    "load": ("loaded", "took on", "took aboard", "shipped"),
    "land": ("landed", "unloaded", "put ashore", "discharged"),
}
PASSIVE = {
    "load": ("loaded onto", "put aboard", "taken on by"),
    "land": ("landed from", "taken off", "unloaded from"),
}
ACTIVE_FRAMES = (
    "The {ship} {verb} {what} at quay {quay} on {day}.",
    "On {day} the {ship} {verb} {what} at quay {quay}.",
    "{day}, quay {quay}: the {ship} {verb} {what}.",
    "At quay {quay} the {ship} {verb} {what} on {day}.",
)
PASSIVE_FRAMES = (
    "{what} were {verb} the {ship} at quay {quay} on {day}.",
    "Quay {quay}, {day}: {what} {verb} the {ship}.",
)

TRAIN, HELD_OUT = 360, 60


def record(rng: random.Random, ship: str, goods: str) -> tuple[str, str]:
    """A sentence and its JSON line, for a ship and its goods, the rest drawn."""
    op = rng.choice(("load", "land"))
    number, quay, day = rng.randint(2, 99), rng.randint(1, 9), rng.choice(DAYS)
    frame = rng.choice(ACTIVE_FRAMES + PASSIVE_FRAMES)
    verb = rng.choice((PASSIVE if frame in PASSIVE_FRAMES else ACTIVE)[op])
    what = f"{number} {rng.choice(UNITS)} of {goods}"
    answer = {"ship": ship, "op": op, "n": number, "of": goods, "at": quay, "day": day[:3].lower()}
    return frame.format(ship=ship, verb=verb, what=what, quay=quay, day=day), json.dumps(answer, separators=(",", ":"))


def main() -> None:
    rng = random.Random(20)
    pairs = [(ship, goods) for ship in SHIPS for goods in GOODS]
    rng.shuffle(pairs)
    new_pairs = [(ship, rng.choice(GOODS)) for ship in NEW_SHIPS for _ in range(2)]
    held_out = pairs[: HELD_OUT - len(new_pairs)] + new_pairs
    rng.shuffle(held_out)
    for name, chosen in (("train", pairs[HELD_OUT : HELD_OUT + TRAIN]), ("heldout", held_out)):
        with open(Path(__file__).with_name(f"harbour_{name}.jsonl"), "w", encoding="utf-8") as file:
            for ship, goods in chosen:
                question, answer = record(rng, ship, goods)
                messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main()
