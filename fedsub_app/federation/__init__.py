"""Nodes and messages: who hosts which client, the wire format, the grid in this process."""
