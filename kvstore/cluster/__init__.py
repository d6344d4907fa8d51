"""Who is there: the immutable view of targets, and where it is kept."""
