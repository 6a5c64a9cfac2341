"""What two folders that must be equal are compared by."""

from __future__ import annotations

import hashlib
from pathlib import Path


def hashes(folder: Path) -> dict[str, str]:
    """Of every file."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
