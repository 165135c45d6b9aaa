"""Methods that train chosen entries, slices or vectors of the base's own weights."""
