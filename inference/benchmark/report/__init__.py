"""The HTML report of `jakiro bench`."""
