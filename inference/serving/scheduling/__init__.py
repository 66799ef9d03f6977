"""The path of a request to the decode engine: admission, jobs, and the thread of the models."""
