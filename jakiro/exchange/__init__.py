"""Exchange of drafters with other projects: import of published heads, and export of drafters."""
