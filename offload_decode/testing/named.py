"""The suites that `pytest --offload-decode-…` asks for: pytest collects the classes of this file."""

from __future__ import annotations

from offload_decode import testing
from offload_decode.testing.plugin import SUITES, asked

for _what, _name in asked:
    _suite, _attribute, _ = SUITES[_what]
    _title = f"Test_{_what}_{_name}"
    globals()[_title] = type(_title, (getattr(testing, _suite),), {_attribute: _name})
