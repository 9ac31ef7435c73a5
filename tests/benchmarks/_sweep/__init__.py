"""The concurrency sweep: users ask for long prompts again and again, more of them than caches can hold.

Importing the package prepares for vLLM, which it does not import; the modules within do.
"""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[2]
for _folder in (_TESTS, _TESTS / "benchmarks", _TESTS / "with_vllm"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

from support.vllm_environment import prepare  # noqa: E402

prepare()
