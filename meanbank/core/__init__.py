"""The words that memories and value sources share: configuration, state, values, layout, context."""
