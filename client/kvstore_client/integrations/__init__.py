"""Adapters that give an engine's KV cache to the store; each needs its engine installed, none is imported from here."""
