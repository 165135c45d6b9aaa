"""Models that answer in words: on this machine, or behind endpoints that speak the OpenAI protocol."""
