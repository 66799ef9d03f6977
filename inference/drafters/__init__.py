"""Everything that drafts, behind one protocol."""
