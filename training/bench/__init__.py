"""Programs that measure training itself."""
