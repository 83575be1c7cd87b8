"""Where the suites try what runs on a device: on a CUDA device, or on what a test run puts in its place."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch


def _cuda() -> AbstractContextManager[object]:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return nullcontext()


on_device: Callable[[], AbstractContextManager[object]] = _cuda
"""Within it `torch.device("cuda")` can be used; the test is skipped where there is none."""

beside_device: Callable[[], AbstractContextManager[object]] = nullcontext
"""Within it a host computes what it is compared with."""
