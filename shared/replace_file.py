"""Writing a small file as a whole: whoever reads it finds the old content or the new."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Put this content in place of the file's at once. Several processes and threads may do so together.

    Raises:
        OSError: It cannot be written; nothing is left beside the file.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
