"""What a node keeps on disk besides payload generations: the shared WAL, its replay, segments and the meta store."""
