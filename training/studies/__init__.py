"""Studies: experiments made of several training runs."""
