"""`jakiro regenerate`: responses rewritten by the target."""
