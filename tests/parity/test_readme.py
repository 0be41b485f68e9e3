"""The README's Python runs as written, top to bottom."""

import re
from pathlib import Path


README = Path(__file__).parents[2] / "README.md"


def test_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 4
    exec("\n".join(blocks), {})
