"""Names of the numbers that travel through the engine.

They are plain integers at run time: a hot path never pays for them. Indexes and terms start at 1; 0 means none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType, TypeAlias

NodeId: TypeAlias = int
"""A node of the cluster: 1 to 2**32 - 1, chosen by the operator, never reused for another machine."""
GroupUid = NewType("GroupUid", int)
"""A group's incarnation: 64 random bits. A deleted and re-created group gets another one."""
Index: TypeAlias = int
Term: TypeAlias = int
Buffer: TypeAlias = bytes | bytearray | memoryview
Bodies: TypeAlias = Sequence[Buffer]
