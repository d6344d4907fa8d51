"""The data plane's protocol: frames, messages and sessions, with no I/O of their own."""
