"""A log-linear latency histogram: fixed buckets, one increment a sample, mergeable between processes.

Each power of two of microseconds is split into 32 buckets, so a quantile is within 3.2 % of the true value. Called
by `bench.load` for every acknowledged frame and by `bench.report` to merge.
"""

from __future__ import annotations

from collections.abc import Sequence

SUB_BITS = 5
SUB = 1 << SUB_BITS
EXPONENTS = 36
"""Up to 2**36 microseconds, 19 hours."""
BUCKETS = EXPONENTS * SUB


def bucket_of(microseconds: int) -> int:
    """Return the bucket a value falls into; values beyond the range count in the last one."""
    if microseconds < SUB:
        return max(microseconds, 0)
    shift = microseconds.bit_length() - SUB_BITS - 1
    return min(((shift + 1) << SUB_BITS) + (microseconds >> shift) - SUB, BUCKETS - 1)


def lower_edge(bucket: int) -> int:
    """Return the smallest value, in microseconds, that falls into a bucket."""
    group, rest = divmod(bucket, SUB)
    if group == 0:
        return rest
    return (SUB + rest) << (group - 1)


class Histogram:
    """Counts per bucket; `add` takes seconds."""

    __slots__ = ("counts", "samples", "total_seconds", "worst_seconds")

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.samples = 0
        self.total_seconds = 0.0
        self.worst_seconds = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count `times` operations that took `seconds`."""
        self.counts[bucket_of(int(seconds * 1e6))] += times
        self.samples += times
        self.total_seconds += seconds * times
        if seconds > self.worst_seconds:
            self.worst_seconds = seconds

    def merge(self, other: Histogram) -> None:
        """Add another histogram's counts to this one."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.samples += other.samples
        self.total_seconds += other.total_seconds
        self.worst_seconds = max(self.worst_seconds, other.worst_seconds)

    def quantile(self, share: float) -> float:
        """Return seconds below which `share` (0 to 1) of the samples lie; 0 without samples."""
        if not self.samples:
            return 0.0
        wanted = share * self.samples
        seen = 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                low = lower_edge(bucket)
                high = lower_edge(bucket + 1)
                return min((low + high) / 2e6, self.worst_seconds)
        return self.worst_seconds

    @property
    def mean(self) -> float:
        """Mean seconds of all samples; 0 without any."""
        return self.total_seconds / self.samples if self.samples else 0.0

    def dump(self) -> dict[str, object]:
        """Return plain values for JSON; empty buckets are left out."""
        return {
            "counts": [[bucket, count] for bucket, count in enumerate(self.counts) if count],
            "samples": self.samples,
            "total_seconds": self.total_seconds,
            "worst_seconds": self.worst_seconds,
        }

    @classmethod
    def load(
        cls, counts: Sequence[Sequence[int]], samples: int, total_seconds: float, worst_seconds: float
    ) -> Histogram:
        """Return what `dump` gave."""
        found = cls()
        for bucket, count in counts:
            found.counts[bucket] = count
        found.samples = samples
        found.total_seconds = total_seconds
        found.worst_seconds = worst_seconds
        return found
