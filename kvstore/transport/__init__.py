"""How bytes move between a node and its clients: one contract, TCP first."""
