"""Generated from proto/kvstore/v1 by `./dev proto`; do not edit."""
