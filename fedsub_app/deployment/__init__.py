"""The engines: the local one, and a SuperLink and SuperNodes with their keys and commands."""
