"""The frozen target model: adapter, support checks, masks, cache, tail layers and record."""
