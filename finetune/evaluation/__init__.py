"""Scores of a model on tasks: exact match, multiple choice, held-out loss; and talking to it."""
