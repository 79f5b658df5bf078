"""Scripts that `recognition.export` copies beside exported models: they need neither torch nor Starling."""
