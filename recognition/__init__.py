"""Recognition: models as bundles, what recognizes with them, and the data that they are trained on."""
