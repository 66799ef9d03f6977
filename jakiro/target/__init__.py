"""The frozen target model: adapter, support checks, masks, cache, identifying record."""
