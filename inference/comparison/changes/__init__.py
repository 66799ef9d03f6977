"""What changed from one comparison to another, and whether it is beyond noise."""
