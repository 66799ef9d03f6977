"""`jakiro bench --compare`: two results side by side."""
