"""Finds which modules of which layers to train, by training them: CoFiTune's coarse level."""
