"""Selective reflection: a teacher rewrites rows, and the student decides which version is kept."""
