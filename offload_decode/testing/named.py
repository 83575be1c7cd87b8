"""The suites that `pytest --offload-decode-…` asks for: pytest collects the classes of this file."""

from offload_decode import testing
from offload_decode.testing.plugin import SUITES, requested

for _kind, _name in requested:
    _suite, _attribute, _ = SUITES[_kind]
    _title = f"Test_{_kind}_{_name}"
    globals()[_title] = type(_title, (getattr(testing, _suite),), {_attribute: _name})
