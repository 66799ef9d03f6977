"""`jakiro bench`: decoding methods compared on the same prompts."""
