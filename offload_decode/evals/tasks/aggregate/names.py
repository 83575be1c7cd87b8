"""Made-up people and towns, from the two halves of the words; their endings tell which is which."""

from __future__ import annotations

import random
import re

from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.words import Split

# Plain words, each in the half that `words` puts it in: of all nouns, many make no name of a town.
_PLAIN_NOUNS = """
acorn anchor anvil apple apron arch arrow atlas attic badge bakery balloon bamboo banner barn barrel basin
basket beacon beam bear beaver bell bench berry bicycle bird blade blanket boat bottle boulder branch brick
bridge broom brush bucket buffalo button cabin cable cactus camel camera candle canoe canyon carpet cart
castle cat cave cellar chair chalk chapel cherry chess chimney circle cliff clock cloud coach coast cobra
coin comet compass copper corner cotton crane crater crow crown crystal cup curtain deer desert desk diamond
dolphin donkey door dragon drawer drum duck eagle echo elbow engine falcon feather fence ferry fiddle field
finch finger flag flame flute forest fossil fox frog galaxy garden gate glacier glass glove goat goose grain
grape gravel guitar hammer hammock harbor harp hawk hedge helmet heron hill hinge honey horn horse hotel
iron island ivory jacket jaguar jar jewel jungle kettle kite kitten knife knot ladder lagoon lake lamp
lantern lemon leopard lily lion lizard locket magnet mantle maple marble market meadow medal melon mill
monkey moon moose mouse museum napkin needle nest oak olive onion orchard organ otter owl oyster paddle
palace panda panther paper parcel parrot peach pebble pencil penguin pepper piano pigeon pillow pine planet
plum pocket pond poppy prairie puppet quarry rabbit radio raven ribbon ring river robin rocket rope rose
saddle salmon seal shadow shark shelf shell shield ship shoe shore shovel sky snail snake spider spoon
stable star statue stone storm stove summit swan teapot temple tent thistle thunder tiger toast torch tower
train trumpet tulip tunnel turtle valley vase velvet violin volcano wagon walnut whale wheel whistle willow
window wolf zebra
"""
_PLAIN_ADJECTIVES = """
able ample arctic autumn awake azure bitter blank bold brave brief bright brisk broad bronze calm chief
civil clean clear clever cloudy coarse cold coral cosmic crisp cruel damp dapper daring dark deep dense dim
double dry dull dusty eager early east elder empty equal exact faint fair famous fancy fast feral fierce
fine firm flat fluffy foggy fond formal frank free fresh frosty frozen gentle giant gifted glad global
golden good grand grave green grim gritty hairy handy happy hardy harsh hasty heavy hollow honest huge
humble hungry icy idle jolly keen kind large lazy lean level light little lively local lonely long loud
loyal lucky lunar major mellow mild minor misty mobile modern modest moist muddy narrow native neat new
nimble noble noisy north odd old open orange outer pale plain polite proud purple quick quiet rapid rare raw
ready red rich ripe rough round royal rusty salty secret sharp short shy silent silver simple sleepy slim
slow small smooth snowy soft solar solid sour south spare spicy square stable stale steady steep stern stiff
still stout strict strong sudden sunny super sweet swift tall tame tart tender thick thin tidy tiny tired
tough urban usual vague vast violet vivid warm wary weak weary west wet white wide wild windy wise witty
wooden yellow young
"""
_FIRST_NAMES = """
Ada Adele Agnes Albert Alice Amos Andrew Anton Arthur Astrid Beatrice Bernard Bridget Carla Cecil Charles
Daisy Daniel Dora Edgar Edith Edmund Eleanor Emil Emma Ernest Ethel Eva Fanny Florence Francis Frank
Freda George Grace Hanna Harriet Harry Helen Henry Ida Isaac Ivan Jacob Jane Jasper Joan
"""
_OTHER_FIRST_NAMES = """
Bruno Clara Conrad Dmitri Elsa Felix Gerda Hugo Irene Jonas Katya Leo Lydia Mabel Magnus Nadia Omar Pablo
Rachel Rufus Selma Stefan Thea Ursula Viktor Wanda
"""
_FIRST: dict[Split, list[str]] = {"train": _FIRST_NAMES.split(), "eval": _OTHER_FIRST_NAMES.split()}
_NOUNS = {split: [word for word in _PLAIN_NOUNS.split() if word in words.NOUNS[split]] for split in _FIRST}
_ADJECTIVES = {
    split: [word for word in _PLAIN_ADJECTIVES.split() if word in words.ADJECTIVES[split]] for split in _FIRST
}
_SURNAMES = ("son", "well", "sen", "berg", "ley", "mann", "ett", "ovsky", "smith", "grove", "croft", "worth")
_TOWNS = ("ham", "wick", "bury", "stead", "mouth", "dale")
_FEW, _MANY = 60, 4000  # more towns, or people, than these need longer names to differ

_NOBODY = "person|reason|lesson|season|prison"  # `the only person` is no name

# In small letters too, as answers may be.
PERSON = re.compile(
    rf"\b[^\W\d_]+ (?!{_NOBODY})[^\W\d_]+(?:{'|'.join(_SURNAMES)})(?:-[^\W\d_]+)?(?![\w-])", re.IGNORECASE
)
TOWN = re.compile(
    rf"(?<![\w-])[^\W\d_]{{3,}}(?:{'|'.join(_TOWNS)})(?:-on(?:-[^\W\d_]+)+)?(?![\w-])", re.IGNORECASE
)


def first(rng: random.Random, split: Split) -> str:
    """A first name."""
    return rng.choice(_FIRST[split])


def surname(rng: random.Random, split: Split) -> str:
    """A surname such as `Lanternwell`."""
    return rng.choice(_NOUNS[split]).capitalize() + rng.choice(_SURNAMES)


def person(rng: random.Random, split: Split) -> str:
    """A first name and a surname."""
    return f"{first(rng, split)} {surname(rng, split)}"


def people(rng: random.Random, count: int, split: Split) -> list[str]:
    """Different people; where very many are needed, with double names such as `Lanternwell-Ottermann`."""

    def draw() -> str:
        return f"{person(rng, split)}-{surname(rng, split)}" if count > _MANY else person(rng, split)

    return words.distinct(draw, count)


def towns(rng: random.Random, count: int, split: Split) -> list[str]:
    """Different towns: `Otterham`, of many `Otterham-on-Cliff`, of very many `Otterham-on-Brisk-Cliff`."""

    def draw() -> str:
        name = rng.choice(_NOUNS[split]).capitalize() + rng.choice(_TOWNS)
        if count > _FEW:
            name += "-on"
        if count > _MANY:
            name += f"-{rng.choice(_ADJECTIVES[split]).capitalize()}"
        return f"{name}-{rng.choice(_NOUNS[split]).capitalize()}" if count > _FEW else name

    return words.distinct(draw, count)


def thing(rng: random.Random, split: Split) -> str:
    """A thing such as `brisk lantern`."""
    return f"{rng.choice(_ADJECTIVES[split])} {rng.choice(_NOUNS[split])}"
