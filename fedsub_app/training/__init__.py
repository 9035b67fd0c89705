"""What a client does on its own machine: workplace, local training, optimizer, objectives, costs, durable state."""
