"""Will it fit: the memory that a run needs, and what the machine has."""
