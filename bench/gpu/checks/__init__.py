"""What has to hold: two ways to compute the same agree."""
