"""The services: thin servicers over the engine, and the translation between protobuf and domain values."""
