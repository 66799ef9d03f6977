"""Settings, files, logs, provenance, and loading of pretrained models."""
