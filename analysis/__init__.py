"""What we see: comparisons, plots, timelines, reports. Measures and simulates nothing itself."""
