"""Words for keys and values, in two halves: one to train on, one that only evaluation sees."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from typing import Literal

Split = Literal["train", "eval"]

_ADJECTIVES = """
able ample ancient angry arctic autumn awake azure bald bitter blank bold brave brief bright brisk broad
bronze calm careful cheap chief civil clean clear clever cloudy coarse cold common coral cosmic crimson
crisp cruel curious damp dapper daring dark deep dense dim distant dizzy double dry dull dusty eager early
earnest east elastic elder empty equal exact faint fair famous fancy fast feral fierce fine firm flat fluffy
fond foggy formal fragile frank free fresh frosty frozen gentle giant gifted glad global golden good grand
grave green grim gritty hairy handy happy hardy harsh hasty heavy hidden hollow honest huge humble hungry
icy idle jolly keen kind large lazy lean level light little lively local lonely long loud loyal lucky lunar
mad magic major mellow mild minor misty mobile modern modest moist muddy mute narrow native neat nervous new
nimble noble noisy north odd old open orange outer pale patient plain polite proud purple quick quiet rapid
rare raw ready red rich ripe rough round royal rusty sad salty scarlet secret sharp short shy silent silver
simple sleepy slim slow small smooth snowy soft solar solid sour south spare spicy square stable stale
steady steep stern stiff still stout strange strict strong sudden sunny super sweet swift tall tame tart
tender thick thin tidy tiny tired tough urban usual vague vast violet vivid warm wary weak weary west wet
white wide wild windy wise witty wooden yellow young zealous
"""

_NOUNS = """
acorn actor anchor anvil apple apron arch arrow atlas attic badge bakery balloon bamboo banner barn barrel
basin basket beacon beam bear beaver bell bench berry bicycle bird blade blanket boat bottle boulder branch
brick bridge broom brush bucket buffalo button cabin cable cactus camel camera candle canoe canyon captain
carpet cart castle cat cave cellar chair chalk chapel cherry chess chimney circle cliff clock cloud coach
coast cobra coin comet compass copper corner cotton cousin crane crater crow crown crystal cup curtain
dancer deer desert desk diamond doctor dolphin donkey door dragon drawer drum duck eagle echo elbow engine
falcon farmer feather fence ferry fiddle field finch finger flag flame flute forest fossil fountain fox frog
galaxy garden gate ghost glacier glass glove goat goose grain grape gravel guitar hammer hammock harbor harp
hawk hedge helmet heron hill hinge honey horn horse hotel house iron island ivory jacket jaguar jar jewel
judge jungle kettle key king kite kitten knife knot ladder lagoon lake lamp lantern lemon leopard letter
lily lion lizard locket magnet mantle maple marble market meadow medal melon mill mirror monkey moon moose
mountain mouse museum napkin needle nest notebook oak ocean olive onion orchard organ otter owl oyster
paddle painter palace panda panther paper parcel parrot peach pebble pencil penguin pepper piano pigeon
pillow pilot pine pirate planet plum pocket pond poppy prairie prince puppet quarry queen rabbit radio raven
ribbon ring river robin rocket rope rose saddle sailor salmon school scissors seal shadow shark sheep shelf
shell shield ship shoe shore shovel singer sky snail snake spider spoon squirrel stable star statue stone
storm stove summit swan table tailor teapot temple tent thistle thunder tiger toast torch tower train
trumpet tulip tunnel turtle valley vase velvet village violin volcano wagon walnut whale wheel whistle
willow window wizard wolf zebra
"""


def _halves(words: str) -> dict[Split, tuple[str, ...]]:
    ordered = words.split()
    held_out = tuple(ordered[4::5])
    return {"train": tuple(w for w in ordered if w not in held_out), "eval": held_out}


ADJECTIVES = _halves(_ADJECTIVES)
NOUNS = _halves(_NOUNS)


def key(rng: random.Random, split: Split) -> str:
    """An adjective-noun key such as `brisk-lantern`. Neither word occurs in the other split."""
    return f"{rng.choice(ADJECTIVES[split])}-{rng.choice(NOUNS[split])}"


def keys(rng: random.Random, count: int, split: Split) -> list[str]:
    """Different keys."""
    return distinct(lambda: key(rng, split), count)


def number(rng: random.Random, split: Split, digits: int = 7) -> str:
    """A number without leading zero. Digit sums that are multiples of five are for evaluation."""
    while True:
        value = rng.randrange(10 ** (digits - 1), 10**digits)
        if (sum(map(int, str(value))) % 5 == 0) == (split == "eval"):
            return str(value)


def identifier(rng: random.Random) -> str:
    """A random UUID (version 4 layout)."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def distinct(draw: Callable[[], str], count: int) -> list[str]:
    """count different draws, in the order drawn."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)


def made_up(rng: random.Random) -> str:
    """A word of two to four syllables that is in no dictionary."""
    return "".join(
        rng.choice("bcdfghjklmnprstvwz")
        + rng.choice(["a", "e", "i", "o", "u", "ai", "ou"])
        + rng.choice(["", "", "n", "r", "s", "l"])
        for _ in range(rng.randint(2, 4))
    )
