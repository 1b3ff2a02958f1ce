"""What everything else is built on: configuration, state, values, layout, context, files."""
