"""What the target says of every packed row, kept on disk: written once, read instead of it."""
