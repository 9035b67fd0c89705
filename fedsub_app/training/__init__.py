"""The problem, and a client's work on its machine: workplace, training, optimizer, objectives, costs, durable state."""
