"""A model that rates: what it is asked, which tokens are its ratings, and what a distribution over them is worth."""
