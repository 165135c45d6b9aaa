"""Models that answer in words: endpoints that speak the OpenAI protocol."""
