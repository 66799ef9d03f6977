"""Draft trees that fit the machine: measured costs, offline search, `tree="auto"`."""
