"""Running models: generation now; captured decode steps, caches and serving later."""
