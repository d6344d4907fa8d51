"""The processes of `kvstore demo`: each plays one part of inference and tells its parent on standard output."""
