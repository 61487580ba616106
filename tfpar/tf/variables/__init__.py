"""Variables whose value is not made yet, split over ranks, or whole."""
