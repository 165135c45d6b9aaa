"""Recipes: what they may say, how they are read, and what is wrong with them."""
