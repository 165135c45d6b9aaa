"""What a run leaves for people: plots, a page, a model card."""
