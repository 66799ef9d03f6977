"""`jakiro bench --compare`: two result files side by side."""
