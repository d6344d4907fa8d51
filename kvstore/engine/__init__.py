"""The store of one drive: records in segments, an index in memory, one truth in the log."""
