"""The command `kvstore`: what people run, and how it looks."""
