"""What selectors, indexes and prefill methods promise, as suites that pytest collects: docs/extending.md.

A test class inherits one and names what it tests. pytest is imported here and nowhere else, and nothing but
tests imports this room.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload_decode.testing.index_contract import IndexContract
    from offload_decode.testing.method_contract import MethodContract
    from offload_decode.testing.selector_contract import SelectorContract

__all__ = ["IndexContract", "MethodContract", "SelectorContract"]


def __getattr__(name: str) -> object:
    # Imported when asked for: the plugin beside this file is to import nothing but pytest.
    if name in __all__:
        what = name.removesuffix("Contract").lower()
        return getattr(import_module(f"offload_decode.testing.{what}_contract"), name)
    raise AttributeError(f"module 'offload_decode.testing' has no attribute '{name}'")
