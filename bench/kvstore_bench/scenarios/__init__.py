"""Scenarios: each measures one kind of work and returns rows."""
