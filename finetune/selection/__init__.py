"""Scores the rows of a recipe and writes those that are kept: ``finetune select``."""
