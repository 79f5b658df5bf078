"""Networks of the acoustic models, as torch modules; their configurations are in `speech.models`, without torch."""
