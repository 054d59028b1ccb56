"""From values to what people and programs read."""
