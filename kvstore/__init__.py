"""A disaggregated KVCache store: content-addressed KV chunks of language models on SSD nodes."""

__version__ = "0.1.0"
