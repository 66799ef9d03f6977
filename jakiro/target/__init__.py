"""The frozen target model: adapter, checks for support, masks, cache, tail layers and record."""
