"""The methods for a Flower app of one's own: strategies made of keywords, a ClientApp made of a network and data."""
