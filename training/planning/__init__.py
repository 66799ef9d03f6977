"""Memory, disk and time that a run will take."""
