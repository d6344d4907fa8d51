"""The node: a supervisor with the control plane, and workers that own drives and move payload."""
