"""The methods for your own Flower app: strategies made from keywords, a ClientApp made from a network and data."""
