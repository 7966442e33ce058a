"""The engine: slots over one target context, batched by a pure scheduler, computed by one thread."""
