"""Draft trees that fit the machine: measured costs, offline search, and `tree="auto"`."""
