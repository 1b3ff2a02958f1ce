"""The words that both axes share: configuration, state, values, layout, context."""
