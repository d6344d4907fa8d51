"""Drives: one flat space of bytes behind one interface, whatever moves the bytes."""
