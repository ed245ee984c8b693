"""What every part speaks of: configurations, weights, the row layout, the problem a backend gets, errors, costs."""
