"""One arithmetic for the host and for a device, so that their results are compared bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

from torch import Tensor

from offload_decode import attention
from offload_decode.attention import dense, device_tokens, pages_reference
from offload_decode.attention import pages as dispatch
from offload_decode.attention.rows import Rows
from offload_decode.attention.state import attend
from offload_decode.types import AttentionState

_DEVICE = "offload_decode.attention.pages_device"


@contextmanager
def references() -> Iterator[None]:
    """Within the block attention and Quest's pages are computed by their references, on both."""
    pages = SimpleNamespace(
        page_scores=pages_reference.page_scores,
        top_pages=pages_reference.top_pages,
        attend_pages=_attend_pages,
    )
    known = sys.modules.get(_DEVICE)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(dense, "_fused", attend))
        stack.enter_context(mock.patch.object(dispatch, "pages_host", pages))
        stack.enter_context(mock.patch.object(device_tokens, "_by_program", device_tokens.reference))
        # Where it was imported, and where it is imported for the first time. (`mock.patch.dict` would also
        # forget what else is imported meanwhile.)
        stack.enter_context(mock.patch.object(attention, "pages_device", pages, create=True))
        sys.modules[_DEVICE] = pages  # type: ignore[assignment]
        try:
            yield
        finally:
            del sys.modules[_DEVICE]
            if known is not None:
                sys.modules[_DEVICE] = known


def _attend_pages(
    query: Tensor,
    keys: Sequence[Rows] | Tensor,
    values: Sequence[Rows] | Tensor,
    pages: Tensor,
    page_size: int,
    limit: Tensor,
    scaling: float,
    softcap: float | None = None,
) -> AttentionState:
    if not isinstance(keys, Tensor):
        assert not isinstance(values, Tensor)
        keys, values, pages = dispatch.gather_pages(keys, values, pages, page_size, query.device)
    assert isinstance(values, Tensor)
    return pages_reference.attend_pages(query, keys, values, pages, page_size, limit, scaling, softcap)
