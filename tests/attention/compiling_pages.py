"""Compiles the kernels of Quest's pages and of chosen tokens for a card that is not there:
`python -m tests.attention.compiling_pages 90 5`.

Every launch goes through Triton's own specialisation of the real arguments, down to ptxas, and stops short of
running. The interpreter accepts programs that a card does not: types that change in a loop, tiles too large
for shared memory.
"""

import sys
from functools import partialmethod

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from offload_decode.attention import device_tokens
from offload_decode.attention import pages_device as device_pages
from offload_decode.attention.pages_reference import PageBounds
from offload_decode.attention.queries import Queries

SHARED_BYTES = 99 * 1024  # of a program: what consumer cards from the RTX 30 series on have


class AbsentCard:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


# (KV heads, group, channels of keys and of values, pages, page size, bounds, keys, softcap)
SHAPES = (
    (8, 4, 128, 128, 2048, 16, torch.float16, torch.float16, None),
    (1, 40, 80, 80, 9000, 7, torch.int8, torch.bfloat16, 30.0),
    (1, 128, 576, 576, 11, 16, torch.float16, torch.bfloat16, None),
    (2, 1, 256, 256, 11, 3, torch.float32, torch.float32, None),
    (8, 1, 192, 128, 11, 16, torch.float16, torch.bfloat16, None),
)


def compile_for(capability: int, shapes: int) -> list[tuple[str, int]]:
    """Names of the kernels compiled for the first so many SHAPES, with the bytes of shared memory of each."""
    compiled = []
    launch = JITFunction.run

    def compile_only(self, *args, **options):
        kernel = launch(self, *args, **options | {"warmup": True})
        assert kernel.asm["cubin"]
        compiled.append((self.fn.__name__, kernel.metadata.shared))

    driver.set_active(AbsentCard(capability))
    JITFunction.run = partialmethod(compile_only)
    for heads, group, dim, value_dim, pages, size, narrow, dtype, softcap in SHAPES[:shapes]:
        lower, upper = torch.zeros(2, heads, pages, dim, dtype=narrow)
        scale = torch.zeros(heads, -(-pages // 256), dim) if narrow == torch.int8 else None
        query = torch.zeros(heads, 1, group, dim)
        scores = device_pages.page_scores(query, PageBounds(lower, upper, scale))
        chosen = device_pages.top_pages(scores, 128)
        keys, values = (torch.zeros(heads, pages * size, own, dtype=dtype) for own in (dim, value_dim))
        limit = torch.full((heads,), 2048)
        device_pages.attend_pages(query, keys, values, chosen, size, limit, 0.1, softcap)
        rows, places = keys.flatten(0, 1), torch.zeros(heads, group, 1024, dtype=torch.int64)
        own = Queries(query[:, 0], 0.1, softcap), rows, values.flatten(0, 1), places
        for scores in (None, torch.zeros(heads, group, 1024)):
            device_tokens._by_program(*own, scores)
    return compiled


if __name__ == "__main__":
    for name, shared in compile_for(*map(int, sys.argv[1:])):
        print(name, shared)
        if shared > SHARED_BYTES:
            sys.exit(f"{name} needs {shared} bytes of shared memory, more than {SHARED_BYTES}")
