"""What every part uses: configurations, weights, the row layout, the problem a backend gets, errors, costs."""
