"""axe-core 4.14.0 (Mozilla Public License 2.0): what stands between a page and some readers.

`tests/third_party/axe-core/axe.min.js` is the file of the npm package axe-core, unchanged.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "third_party" / "axe-core" / "axe.min.js"
SHA256 = "20c09fe157a8a34a30e241aaa1fcdade657734f08ab379ecfbeb7d45cc46e878"

RUN = """
const done = arguments[arguments.length - 1];
axe.run(document, { resultTypes: ["violations"] })
  .then((found) => done(found.violations), (error) => done(String(error)));
"""


def violations(driver: Any) -> list[str]:
    """Return every violation on the page that is shown, with the elements that it concerns."""
    content = FILE.read_bytes()
    assert hashlib.sha256(content).hexdigest() == SHA256, f"{FILE} is not the pinned file"
    driver.execute_script(content.decode())
    found = driver.execute_async_script(RUN)
    assert isinstance(found, list), found
    return [
        f"{it['id']}: {node['target']} {node['html'][:120]} {node.get('failureSummary', '')}"
        for it in found
        for node in it["nodes"]
    ]
