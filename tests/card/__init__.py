"""A stand-in for a CUDA device, so that what runs on a card is tested where there is none.

Within `stand_in` torch has a device `cuda`. Its tensors lie in host memory and compute there, with the very
bits of a CPU, but keep a card's rules: they do not mix with tensors of the host, numpy does not read them,
and what other streams or copies that were not waited for leave is not looked at. What makes the host wait is
noted, with the line that asked for it.
"""

from tests.card.device import Card
from tests.card.present import references, stand_in
from tests.card.streams import Waited

__all__ = ["Card", "Waited", "references", "stand_in"]
