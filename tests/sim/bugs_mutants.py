"""Small changes of single lines that the product's own tests once did not notice. Planted by `planted`."""

from __future__ import annotations

from logyard.payloads.writing import Writing

from .bugs import Bug, edited

BUGS = (
    Bug(
        "row_in_hand_dropped",
        "a full map loses no payload",
        [(Writing, "write", edited(("unwritten.append(current)", "pass")))],
        featured=frozenset({"maps"}),
    ),
)
