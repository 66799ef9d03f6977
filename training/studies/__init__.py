"""Studies: experiments that consist of several training runs."""
