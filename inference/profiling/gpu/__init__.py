"""Measurements on a GPU (`jakiro profile gpu`), which need no download and no trained weights."""
