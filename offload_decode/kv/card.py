"""How a prefill uses a card and the way to the disk behind it: what the job keeps to and `plan` counts."""

BLOCK_TOKENS = 1 << 15
"""Earlier tokens that lie or come together: so many that to merge a block takes little beside attending."""
AHEAD = 2
"""Blocks that have room on a card without staying there: one is attended to while another comes."""
RESERVE = 16
"""One part of so many of a card's memory is left free, for what torch's pool loses between its pieces."""
QUEUED = 4
"""Things that wait to be written, each at most the keys and values of a layer's chunk."""
