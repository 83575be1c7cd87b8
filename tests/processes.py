"""Programs in processes of their own."""

import subprocess
import sys
from typing import Any


def apart(
    program: str, *arguments: object, timeout: float = 300, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a Python program with these arguments; whoever calls looks at its code."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **more)
