"""Limits that kvstore is measured against: plain sockets, plain disks."""
