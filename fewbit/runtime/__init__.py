"""Running models: generation, and the compiled decode step of CPUs."""
