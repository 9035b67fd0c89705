"""The methods' mathematics: pure functions on named tensors; nothing here knows Flower, files or the network."""
