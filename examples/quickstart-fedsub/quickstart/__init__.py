"""A Flower app: a small network learns scikit-learn's digits, of which every client has some."""
