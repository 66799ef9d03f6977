"""Adaptation of a trained drafter to the texts of a running server (arXiv 2310.07177).

The server keeps token ids of recent texts in memory (`traffic`). Another process learns from them
(`lesson`), and writes a version of the drafter's weights only if it drafts better (`versions`). The
server changes to that version between two requests (`weights`). Nothing here depends on HTTP or on
training.
"""
