"""The values every room shares: keys, layouts, namespaces, checksums, outcomes. Importers name the module."""
