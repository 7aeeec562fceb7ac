"""The parts that keep a node's data on its disk, by name: for who composes a node and for its status.

No part is given all of them: each takes those that it needs.
"""

from __future__ import annotations

from typing import NamedTuple

from ..jobs import Jobs
from ..log.compactor import Compactor
from ..log.gc_blockers import GcBlockers
from ..log.group_logs import GroupLogs
from ..log.janitor import Janitor
from ..log.liveness_accounting import LivenessAccounting
from ..log.location import Location
from ..log.meta_batch import MetaBatch
from ..log.rehoming import Rehoming
from ..log.segment_files import SegmentFiles
from ..log.segment_writer import SegmentWriter


class Storage(NamedTuple):
    """One node's. `jobs` says which of its jobs failed by a defect."""

    jobs: Jobs
    meta_batch: MetaBatch
    location: Location
    segments: SegmentFiles
    accounting: LivenessAccounting
    segment_writer: SegmentWriter
    compactor: Compactor
    gc_blockers: GcBlockers
    janitor: Janitor
    rehoming: Rehoming
    group_logs: GroupLogs
