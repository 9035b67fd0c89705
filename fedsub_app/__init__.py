"""fedsub: run, compare and deploy subnetwork federated learning with Flower."""
