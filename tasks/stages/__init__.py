"""The stages of the pipeline, one a file, and what runs them."""
