"""Bytes as the commands show them: text where they are text, else base64. Called by the commands of each machine."""

from __future__ import annotations

import base64


def text_of(data: bytes) -> str | None:
    """Return the bytes as printable text, or None."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return text if all(character.isprintable() or character in "\n\t" for character in text) else None


def shown(name: str, data: bytes | None) -> dict[str, object]:
    """Return a field for --json: `name` with text, or `name_base64`; nothing for None."""
    if data is None:
        return {}
    text = text_of(data)
    return {f"{name}_base64": base64.b64encode(data).decode()} if text is None else {name: text}


def cell(data: bytes) -> str:
    """Return a cell of a row; tabs and line breaks within text are written as \\t and \\n, other bytes as base64."""
    text = text_of(data)
    text = f"base64:{base64.b64encode(data).decode()}" if text is None else text
    return text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n")
