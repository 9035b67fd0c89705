"""A SuperLink and SuperNodes: their keys, their commands, and all of them on one machine."""
