"""Models, one per file, architecture only; `layouts` says which of their parameters are split over which axis."""
