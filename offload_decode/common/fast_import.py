"""Skip slow imports of torch and transformers that serving a model never needs.

Half of what transformers imports is for training, for several processes, and for compiling. Optional
libraries are reported as missing; required modules get stand-ins, which know the few names asked for during
the import and give way to the real module for any other. For the commands alone: importing the engine as a
library leaves transformers as it is.
"""

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

LIBRARIES = ("psutil", "scipy", "sklearn")
"""Of batches over devices, losses of detectors, and checks of drafts."""
FLAGS = ("is_torch_distributed_available", "is_torch_flex_attn_available")
_ASKED = "transformers.utils.import_utils"
_PATTERNS = "transformers.core_model_loading"
_ALGEBRA = "numba.np.arraymath"
_DYNAMO = "torch._dynamo"
_INDEXING = "torch._dynamo._trace_wrapped_higher_order_op"
_BLAS = "scipy.linalg"
_CLOUD = "accelerate.utils.imports"


def skip_slow_imports() -> None:
    """Skip slow imports in this process from now on; no effect once transformers is imported."""
    if not {"transformers", *_KNOWN} & sys.modules.keys():
        sys.meta_path.insert(0, _Finder())


def _unmarked(marked: Any = None, *how: Any, **more: Any) -> Any:
    """Stands in for torch._dynamo's decorators, while nothing is compiled."""
    return _unmarked if marked is None else marked


_KNOWN: dict[str, dict[str, Callable[..., Any]]] = {
    _DYNAMO: dict.fromkeys(("disable", "allow_in_graph", "assume_constant_result"), _unmarked),
    _INDEXING: {"TransformGetItemToIndex": lambda: _give_way(_INDEXING).TransformGetItemToIndex()},
}


def last_list(text: str) -> str:
    """A file's text from the last line on that begins with `__all__`; the whole text where none does."""
    return text[text.rfind("\n__all__") + 1 :]


class _StandIn(ModuleType):
    """Knows some names of a module, and gives way to it for any other."""

    def __init__(self, name: str, real: ModuleSpec):
        super().__init__(name, "Stands in for a module that takes long to import.")
        if real.submodule_search_locations is not None:
            self.__path__ = list(real.submodule_search_locations)
        vars(self).update(_KNOWN[name])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_give_way(self.__name__), name)


def _give_way(name: str) -> ModuleType:
    """The real module; removes all stand-ins."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for known in _KNOWN:
        if isinstance(sys.modules.get(known), _StandIn):
            del sys.modules[known]
    return importlib.import_module(name)


class _Finder(MetaPathFinder):
    """Finds the stand-ins and the modules of transformers that are changed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in _KNOWN or name in _CHANGES:
            spec = PathFinder.find_spec(name, path)
            if spec is None or spec.loader is None:
                return None
            if load := _CHANGES.get(name):
                vars(spec.loader)["exec_module"] = partial(load, spec.loader.exec_module)
                return spec
            package = spec.submodule_search_locations is not None
            return ModuleSpec(name, _Made(_StandIn(name, spec)), is_package=package)
        if name.startswith(f"{_DYNAMO}."):
            _give_way(_DYNAMO)
            there = sys.modules.get(name)  # the package may have loaded it: never run it twice
            return None if there is None else ModuleSpec(name, _Made(there))
        return None


class _Made(Loader):
    """Loads a module that exists already."""

    def __init__(self, module: ModuleType):
        self._module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _without_libraries(load: Callable[[ModuleType], None], module: ModuleType) -> None:
    load(module)
    for flag in FLAGS:
        setattr(module, flag, lambda: False)
    known = vars(module)
    if found := known.get("_is_package_available"):
        known["_is_package_available"] = lambda name, *how, **more: (
            (False, None) if name in LIBRARIES else found(name, *how, **more)
        )
    # It reads each of its 1,600 files twice for their `__all__`: read once, from that line on.
    if listed := known.get("fetch__all__"):
        known["fetch__all__"] = lambda text: listed(last_list(text))
    if walked := known.get("create_import_structure_from_path"):
        known["create_import_structure_from_path"] = lru_cache(None)(walked.__wrapped__)


def _without_blas(load: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Without BLAS, for which numba imports scipy where it is installed: our loops call none of it.

    Whoever compiles `numpy.dot` later gets BLAS: numba looks for it again, and only `numpy.correlate` and
    `convolve` keep a loop of their own.
    """
    loaded = sys.modules.get(_BLAS)
    sys.modules[_BLAS] = None  # type: ignore[assignment]  # importlib's mark of a module that cannot be imported
    try:
        load(module)
    finally:
        del sys.modules[_BLAS]
        if loaded is not None:
            sys.modules[_BLAS] = loaded


def _without_cloud(load: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Without Amazon's library, which accelerate imports for its launcher where it is installed."""
    load(module)
    vars(module)["is_boto3_available"] = lambda: False


def _compiling_late(load: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Compile its thousand patterns of weight names, one for every architecture, only when used."""
    load(module)
    if vars(module).get("re") is re:
        vars(module)["re"] = SimpleNamespace(**{**vars(re), "compile": LatePattern})


class LatePattern:
    """A pattern that is compiled at first use."""

    def __init__(self, pattern: str, flags: int = 0):
        self._given = pattern, flags

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(*self._given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # let copy and pickle see the object itself
            raise AttributeError(name)
        return getattr(self._compiled, name)


_CHANGES: dict[str, Callable[[Callable[[ModuleType], None], ModuleType], None]] = {
    _ASKED: _without_libraries,
    _PATTERNS: _compiling_late,
    _ALGEBRA: _without_blas,
    _CLOUD: _without_cloud,
}
