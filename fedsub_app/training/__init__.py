"""A client's work on its own machine: workplace, local training, optimizer, objectives, costs, durable state."""
