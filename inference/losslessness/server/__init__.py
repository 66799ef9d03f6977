"""`jakiro verify --url`: checks that a running server's texts are those of its target."""
